"""The queue of texts to embed, cut into batches by a token budget: first come, first served.

Online jobs go before bulk ones, but every fourth batch that bulk jobs wait for begins with them,
unless the online ones have waited for longer: bulk must not be the quicker way through a backlog.

Plain Python and numpy. A job is one request with any number of texts; a batch takes slices of
jobs from the head of the queue, so that a large request neither blocks the step size nor costs
Python work per text.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rose.models.card import RowOutput
from rose.runtime.spans import Spans, first_rows

if TYPE_CHECKING:
    from rose.runtime.options import Priority

IntArray = npt.NDArray[np.int32]
BatchKind = tuple[tuple[RowOutput, ...], bool, bool]

BULK_TURN = 4


@dataclass(eq=False, slots=True)
class EmbedJob:
    """The texts of one request.

    `lengths` int32 [B] are tokens per text, all at least 1; `ids` int32 [sum of lengths] their
    tokens, one text after another. `pool_from` tokens at the head of each text are not pooled.
    `segments` int32 [sum of lengths] says, for pairs of texts, of which text a token is. `outputs`
    are what is computed of the texts; for "text" each has a row for each of its `spans`, where it
    has some, else one row. `unseen` int32 [B] are trailing tokens of each text that the others do
    not see.
    """

    ids: IntArray
    lengths: IntArray
    pool_from: int = 0
    priority: "Priority" = "online"
    segments: IntArray | None = None
    spans: Spans | None = None
    outputs: tuple[RowOutput, ...] = ("text",)
    unseen: IntArray | None = None
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    taken: int = 0
    starts: npt.NDArray[np.int64] = field(init=False)
    text_rows: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        """Index the texts: text i is ids[starts[i]:starts[i + 1]]; `text_rows` are likewise."""
        self.starts = first_rows(self.lengths)
        self.text_rows = first_rows(self.spans.counts) if self.spans else np.arange(len(self) + 1)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def kind(self) -> BatchKind:
        """What has to be equal for jobs to be in one batch."""
        return self.outputs, self.spans is not None, self.unseen is not None

    def rows(self, output: RowOutput) -> npt.NDArray[np.int64]:
        """Return where the rows of each text begin among those of an output, int64 [B + 1]."""
        return self.text_rows if output == "text" else self.starts

    @property
    def tokens_waiting(self) -> int:
        """Tokens that no batch has taken yet."""
        return int(self.starts[-1] - self.starts[self.taken])


class JobSlice(NamedTuple):
    """Texts `first` to `last` - 1 of a job."""

    job: EmbedJob
    first: int
    last: int

    @property
    def ids(self) -> IntArray:
        """Tokens of these texts."""
        return self.job.ids[self.job.starts[self.first] : self.job.starts[self.last]]

    @property
    def segments(self) -> IntArray | None:
        """Segments of these texts' tokens, where there are any."""
        segments = self.job.segments
        if segments is None:
            return None
        return segments[self.job.starts[self.first] : self.job.starts[self.last]]

    @property
    def lengths(self) -> IntArray:
        """Tokens per text."""
        return self.job.lengths[self.first : self.last]

    @property
    def unseen(self) -> IntArray | None:
        """Trailing tokens per text that the others do not see, where there are any."""
        return None if self.job.unseen is None else self.job.unseen[self.first : self.last]

    def rows(self, output: RowOutput) -> slice:
        """Return where these texts' rows are among those of an output of the job."""
        rows = self.job.rows(output)
        return slice(int(rows[self.first]), int(rows[self.last]))

    @property
    def spans(self) -> Spans | None:
        """Spans of these texts, where there are any."""
        return self.job.spans.part(self.first, self.last) if self.job.spans else None


class EmbedQueue:
    """Jobs in order of arrival, in two lanes."""

    def __init__(self) -> None:
        """Start empty."""
        self._lanes: dict[Priority, deque[EmbedJob]] = {"online": deque(), "bulk": deque()}
        self._tokens = 0
        self._turns_without_bulk = 0

    def __len__(self) -> int:
        """Count jobs that still have texts to take."""
        return sum(len(lane) for lane in self._lanes.values())

    @property
    def untouched(self) -> int:
        """Jobs of which no batch has taken a text yet."""
        return sum(len(lane) - bool(lane and lane[0].taken) for lane in self._lanes.values())

    @property
    def tokens(self) -> int:
        """Tokens that wait."""
        return self._tokens

    def add(self, job: EmbedJob) -> None:
        """Put a job at the end of its lane."""
        self._lanes[job.priority].append(job)
        self._tokens += job.tokens_waiting

    def cancel(self, job: EmbedJob) -> None:
        """Take what waits of a job out; what runs of it is for the caller to drop."""
        lane = self._lanes[job.priority]
        if job in lane:
            lane.remove(job)
            self._tokens -= job.tokens_waiting

    def take(self, max_tokens: int, max_texts: int) -> list[JobSlice]:
        """Take texts from the heads of the lanes, up to `max_tokens` tokens and `max_texts` texts.

        The first text is taken however long it is, so a text above the budget runs alone.
        """
        slices: list[JobSlice] = []
        for lane in self._lanes_in_turn():
            while lane and max_texts > 0 and max_tokens > 0:
                job = lane[0]
                if slices and job.kind != slices[0].job.kind:
                    return slices
                last = _fit(job, max_tokens, max_texts, at_least_one=not slices)
                if last == job.taken:
                    break
                piece = JobSlice(job, job.taken, last)
                slices.append(piece)
                max_tokens -= len(piece.ids)
                max_texts -= last - piece.first
                self._tokens -= len(piece.ids)
                job.taken = last
                if last == len(job):
                    lane.popleft()
        return slices

    def _lanes_in_turn(self) -> list[deque[EmbedJob]]:
        online, bulk = self._lanes["online"], self._lanes["bulk"]
        if not bulk or not online:
            self._turns_without_bulk = 0
            return [online, bulk]
        self._turns_without_bulk += 1
        if self._turns_without_bulk < BULK_TURN or bulk[0].arrived > online[0].arrived:
            return [online, bulk]
        self._turns_without_bulk = 0
        return [bulk, online]


def _fit(job: EmbedJob, max_tokens: int, max_texts: int, *, at_least_one: bool) -> int:
    """Return the index past the last text of `job` that fits."""
    limit = job.starts[job.taken] + max_tokens
    last = int(np.searchsorted(job.starts, limit, side="right")) - 1
    last = min(last, job.taken + max_texts)
    return max(last, job.taken + 1) if at_least_one else last
