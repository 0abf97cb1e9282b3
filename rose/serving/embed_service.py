"""Embedding inside the engine process: admission, batching, and finishing of requests.

The next batch is launched behind the running one as soon as there is a full one; a smaller one
waits until the running batch is done, since it would only grow meanwhile. When a batch of several
requests fails, each runs once more alone: only the one at fault fails then.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rose.models.card import EmbeddingCard, EmbeddingOutput, RowOutput
from rose.models.output import check_output, finish
from rose.runtime.build import ServedModel
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.errors import NonFiniteError, RequestError
from rose.runtime.faults import is_lasting
from rose.runtime.lazy import LazyTensor
from rose.runtime.options import EmbedOptions
from rose.runtime.queue import EmbedJob, EmbedQueue, IntArray, JobSlice
from rose.runtime.spans import Spans
from rose.serving.turns import Turns

log = logging.getLogger(__name__)

MAX_STEPS_IN_FLIGHT = 2
MAX_TEXTS_PER_BATCH = 1024

FloatRows = npt.NDArray[np.float32]


class OverloadedError(RuntimeError):
    """The queue holds as much as it may."""


class FinishedEmbed(NamedTuple):
    """Rows of the first output, of the requested dtype (or scores), and those of the others.

    Also seconds queued, and seconds of computing.
    """

    vectors: npt.NDArray[Any]
    queued_s: float
    computed_s: float
    more: tuple[npt.NDArray[Any], ...] = ()


Deliver = Callable[[FinishedEmbed | Exception], None]


class EmbedCall:
    """A request under way: its job in the queue and the rows that have arrived."""

    def __init__(self, job: EmbedJob, options: EmbedOptions, deliver: Deliver) -> None:
        """Start with no rows."""
        self.job = job
        self.options = options
        self.deliver = deliver
        self.rows: list[FloatRows] = []
        self.missing = len(job)

    def add(self, piece: JobSlice, parts: Sequence[FloatRows]) -> None:
        """Keep the rows of some texts, of each output."""
        if piece.last - piece.first == len(self.job):
            self.rows = [np.ascontiguousarray(part, np.float32) for part in parts]
            self.missing = 0
            return
        outputs = self.job.outputs
        if not self.rows:
            counts = [int(self.job.rows(output)[-1]) for output in outputs]
            shapes = [(n, part.shape[1]) for n, part in zip(counts, parts, strict=True)]
            self.rows = [np.empty(shape, np.float32) for shape in shapes]
        for rows, output, part in zip(self.rows, outputs, parts, strict=True):
            rows[piece.rows(output)] = part
        self.missing -= piece.last - piece.first


class EmbedService:
    """Queues requests, keeps the runtime busy, and delivers each request's answer once."""

    def __init__(self, served: ServedModel, *, max_queue_tokens: int) -> None:
        """Serve the embedding runtime of `served`, if it has one."""
        self._card = served.card
        self._runtime = self._choose_runtime(served)
        self._budget = self._choose_budget(served)
        self._max_queue_tokens = max_queue_tokens
        self._queue = EmbedQueue()
        self._calls: dict[EmbedJob, EmbedCall] = {}
        self._alone: deque[JobSlice] = deque()  # to run once more, without neighbours
        self._running: deque[tuple[list[JobSlice], LazyTensor[Any]]] = deque()
        self._turns = Turns(self._advance)
        self._check_options = lru_cache(256)(partial(_check_options, served.card.embedding))
        self.steps = 0
        self.tokens = 0

    @property
    def requests(self) -> int:
        """Requests that have no answer yet."""
        return len(self._calls)

    @property
    def queue(self) -> EmbedQueue:
        """What waits."""
        return self._queue

    def submit(self, job: EmbedJob, options: EmbedOptions, deliver: Deliver) -> None:
        """Admit a request; `deliver` gets its answer or the error that it ended with, once.

        Raises:
            RequestError: it is wrong in a way that would hurt others.
            OverloadedError: too much is waiting.
        """
        self._check(job, options)
        if self._queue.tokens and self._queue.tokens + len(job.ids) > self._max_queue_tokens:
            raise OverloadedError("the queue of the engine is full")
        self._calls[job] = EmbedCall(job, options, deliver)
        self._queue.add(job)
        self._turns.ask()

    def cancel(self, job: EmbedJob) -> None:
        """Forget a request; nothing is delivered for it any more."""
        self._queue.cancel(job)
        self._calls.pop(job, None)

    async def run(self) -> None:
        """Launch and finish steps until cancelled.

        Raises:
            RuntimeError: the device is lost.
        """
        await self._turns.run()

    def _advance(self) -> None:
        """Give the device its next batch before the rows of the last one are looked at."""
        done = []
        while self._running and self._running[0][1].done():
            done.append(self._running.popleft())
        try:
            self._launch()
        finally:
            for step in done:
                self._finish_step(*step)
        if self._alone:  # of a batch that failed
            self._launch()

    def _choose_runtime(self, served: ServedModel) -> EmbeddingRuntime | None:
        return served.embedding

    def _choose_budget(self, served: ServedModel) -> int:
        return served.max_batch_tokens

    def _check(self, job: EmbedJob, options: EmbedOptions) -> None:
        """Check what would hurt others if it were wrong; the gateway has checked it nicely."""
        if self._runtime is None:
            raise RequestError(f"model {self._card.name!r} cannot embed", "model")
        self._check_texts(job)
        _check_outputs(job, self._card.embedding)
        self._check_options(options)

    def _check_texts(self, job: EmbedJob) -> None:
        card, lengths = self._card, job.lengths
        shortest, longest = (lengths.min(), lengths.max()) if len(job) else (0, 0)
        if shortest < 1 or job.starts[-1] != len(job.ids):
            raise RequestError("lengths have to be at least 1 and to sum up to the ids", "input")
        if longest > card.max_model_len:
            limit = card.max_model_len
            raise RequestError(f"a text has {longest} tokens, the limit is {limit}", "input")
        if job.ids.min() < 0 or job.ids.max() >= card.vocab_size:
            raise RequestError(f"token ids go from 0 to {card.vocab_size - 1}", "input")
        if not 0 <= job.pool_from < shortest:
            raise RequestError("the prompt leaves no token to pool", "input")
        if job.spans is not None:
            _check_spans(job.spans, lengths)

    def _launch(self) -> None:
        """Launch what there is when the device is idle, and a full batch behind a running one."""
        while len(self._running) < MAX_STEPS_IN_FLIGHT and (slices := self._next()):
            now = time.monotonic()
            for piece in slices:
                piece.job.started = piece.job.started or now
            batch = EmbedBatch.of_slices(slices)
            self.steps += 1
            self.tokens += len(batch.ids)
            assert self._runtime is not None
            lazy = self._runtime.step_all(batch)
            lazy.add_done_callback(self._turns.ask_from_thread)
            self._running.append((slices, lazy))

    def _next(self) -> list[JobSlice]:
        """Take the next batch; empty if there is none to launch now."""
        while self._alone:
            piece = self._alone.popleft()
            if piece.job in self._calls:
                return [piece]
        if self._running and self._queue.tokens < self._budget:
            return []
        return self._queue.take(self._budget, MAX_TEXTS_PER_BATCH)

    def _finish_step(self, slices: list[JobSlice], lazy: LazyTensor[Any]) -> None:
        try:
            rows = [part.numpy() for part in lazy.result()]
        except Exception as error:  # the batch's own; the next one goes on
            if is_lasting(error):
                raise
            log.exception("a step failed")
            self._step_failed(slices, error)
            return
        if len(slices) == 1:
            self._keep(slices[0], rows)
            return
        outputs = slices[0].job.outputs
        starts = [0] * len(rows)
        for piece in slices:
            places = [piece.rows(output) for output in outputs]
            stops = [s + p.stop - p.start for s, p in zip(starts, places, strict=True)]
            cuts = zip(rows, starts, stops, strict=True)
            self._keep(piece, [part[start:stop] for part, start, stop in cuts])
            starts = stops

    def _step_failed(self, slices: list[JobSlice], error: Exception) -> None:
        if len(slices) > 1:
            self._alone.extend(slices)
        else:
            self._end(slices[0].job, RuntimeError(f"the model failed: {error}"))

    def _keep(self, piece: JobSlice, parts: Sequence[FloatRows]) -> None:
        call = self._calls.get(piece.job)
        if call is None:
            return  # cancelled meanwhile
        for output, rows in zip(piece.job.outputs, parts, strict=True):
            finite = np.isfinite(rows)
            if not finite.all():
                row = piece.rows(output).start + np.argmin(finite.all(axis=1))
                text = np.searchsorted(piece.job.rows(output), row, side="right") - 1
                where = f"input[{text}]"
                self._end(piece.job, NonFiniteError("the model computed NaN or infinity", where))
                return
        call.add(piece, parts)
        if not call.missing:
            self._end(piece.job, self._answer(call))

    def _answer(self, call: EmbedCall) -> FinishedEmbed:
        job = call.job
        assert job.started is not None
        first, *more = (
            self._finish_rows(rows, call.options) if output == "text" else rows
            for output, rows in zip(job.outputs, call.rows, strict=True)
        )
        queued_s, computed_s = job.started - job.arrived, time.monotonic() - job.started
        return FinishedEmbed(first, queued_s, computed_s, tuple(more))

    def _finish_rows(self, rows: FloatRows, options: EmbedOptions) -> npt.NDArray[Any]:
        embedding = self._card.embedding
        assert embedding is not None
        return finish(rows, options, embedding.normalize, embedding.quantizer)

    def _end(self, job: EmbedJob, outcome: FinishedEmbed | Exception) -> None:
        call = self._calls.pop(job, None)
        if call is not None:
            self._queue.cancel(job)
            call.deliver(outcome)


def _check_spans(spans: Spans, lengths: IntArray) -> None:
    try:
        spans.check(lengths)
    except ValueError as error:
        raise RequestError(str(error), "input") from None


# Of an output, the kinds of vectors of which a model has to have one.
_NEEDED: dict[RowOutput, tuple[EmbeddingOutput, ...]] = {
    "text": ("dense", "sparse"),
    "multi_vector": ("multi_vector",),
    "token_weights": ("sparse",),
}


def _check_outputs(job: EmbedJob, embedding: EmbeddingCard | None) -> None:
    has = embedding.outputs if embedding else ()
    for output in job.outputs:
        missing = output in _NEEDED and not {*_NEEDED[output]} & {*has}
        if missing or (output == "token_weights" and "dense" not in has):
            raise RequestError(f"the model has no {output}", "model")


def _check_options(embedding: EmbeddingCard | None, options: EmbedOptions) -> None:
    """Refuse options of vectors that the model cannot have."""
    assert embedding is not None
    try:
        check_output(options, embedding.dimensions, embedding.normalize, embedding.quantizer)
    except ValueError as error:  # it begins with the field's name
        raise RequestError(str(error), str(error).partition(":")[0]) from None
