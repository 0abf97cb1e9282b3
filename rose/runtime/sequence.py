"""Sequences (a prompt, its output so far, its place in the page pool), and steps made of them.

Plain Python. Tokens are counted when a step that makes them is scheduled and known when that step's
result arrives, so the next step can be scheduled in between.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal, NamedTuple

from rose.runtime.kv_cache import Parent
from rose.runtime.options import Priority, SamplingParams

Finish = Literal["stop", "length"]


class KeptState(NamedTuple):
    """A state to keep: that after the first `position` tokens of a sequence, in `row`."""

    position: int
    row: int


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one sequence.

    Attributes:
        token_ids: the prompt and the output tokens that are known; `output_ids` are the latter.
        max_outputs: output tokens at most: of the request, the model and the page pool.
        end_ids: output tokens that end it.
        rank: place in the order of service, lower first.
        computed: tokens from the first on whose keys and values lie in pages, or will once the
            steps in flight are done.
        pending: output tokens of steps in flight, not known yet; they follow `token_ids`.
        in_flight: steps in flight that it takes part in.
        slot: index of its row in the device's state while it runs.
        registered: leading pages that were offered to the prefix cache; `parent` is the next
            one's.
        snapshot: row of the state that its first step has to start from.
        marks: positions whose state is kept, for others to start from.
        kept: serial numbers of the cached pages at whose end its state was kept.
        cached_tokens: prompt tokens found in the prefix cache when it was first admitted.
        prompt_rows: leading prompt positions whose log-probabilities need no more computing.
        attempt: how often it was set back by a step that failed; what steps of an earlier attempt
            bring does not count.
        on_trial: set back and not yet proven sound: it has to run alone.
        sampling: the sampler's state; `grammar` is the matcher of its grammar. Opaque here.
    """

    request_id: Hashable
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    max_outputs: int
    end_ids: frozenset[int]
    rank: int
    priority: Priority = "online"
    output_ids: list[int] = field(default_factory=list)
    sampling: Any = None
    grammar: Any = None
    status: Status = Status.WAITING
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    computed: int = 0
    pending: int = 0
    in_flight: int = 0
    registered: int = 0
    parent: Parent = ""
    snapshot: int | None = None
    marks: set[int] = field(default_factory=set)
    kept: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    prompt_rows: int = 0
    attempt: int = 0
    on_trial: bool = False

    @property
    def num_outputs(self) -> int:
        """Output tokens, those in flight included."""
        return len(self.output_ids) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to compute."""
        return len(self.token_ids) + self.pending - self.computed

    @property
    def exhausted(self) -> bool:
        """Whether its last step is done or in flight: it needs no other."""
        return self.computed >= self.prompt_len and self.num_outputs >= self.max_outputs

    @property
    def schedulable(self) -> bool:
        """Whether another step can bring it further now.

        The mask of a grammar follows from the token before, so that one has to be known.
        """
        return not self.exhausted and not (self.pending and self.params.grammar is not None)

    def append(self, token_id: int) -> Finish | None:
        """Add a token that has arrived, and say whether it is the last and why."""
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)
        self.pending -= 1
        outputs = len(self.output_ids)
        minimum = 0 if self.params.grammar is not None else self.params.min_tokens
        if token_id in self.end_ids and outputs > minimum:
            return "stop"
        return "length" if outputs >= self.max_outputs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Tokens of one sequence in a step: `num_tokens` from position `start` on.

    `output_index` counts the output token that its last row samples; None samples none.
    `prompt_rows` is the range of prompt positions whose log-probabilities are wanted. `is_known`
    is false for the token of a step in flight, of which the device alone knows the value.
    `attempt` is the sequence's at the time of planning. The sequence's state is that of the row
    `snapshot` at first, unless that is None, and is copied where `kept` says.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    output_index: int | None
    prompt_rows: range
    is_known: bool
    attempt: int
    snapshot: int | None
    kept: tuple[KeptState, ...]

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for what the row brings."""
        return self.sequence.status is not Status.FINISHED and (
            self.attempt == self.sequence.attempt
        )

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. `scrub` are pages to zero first: their contents may be NaN."""

    rows: list[PlanRow] = field(default_factory=list)
    scrub: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(row.num_tokens for row in self.rows)


class Outcome(NamedTuple):
    """What a step brought for a sequence that was still wanted.

    `row` is its index in the plan; `token_id` is None where nothing was sampled.
    """

    row: int
    sequence: Sequence
    token_id: int | None
    finish: Finish | None = None
    error: Exception | None = None
