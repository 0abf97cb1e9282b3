"""Texts through an embedding runtime of this process, with any outputs of one pass."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rose.models.card import RowOutput
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.errors import NonFiniteError
from rose.runtime.queue import EmbedJob, EmbedQueue, JobSlice
from rose.runtime.spans import Spans
from rose.serving.jobs import trailing

if TYPE_CHECKING:
    from rose.runtime.lazy import LazyTensor

Ids = npt.NDArray[np.int32]
FloatRows = npt.NDArray[np.float32]
Order = npt.NDArray[np.int64]

MAX_TEXTS_PER_BATCH = 1024
STEPS_IN_FLIGHT = 2


def run_outputs(
    runtime: EmbeddingRuntime,
    ids: Sequence[Ids],
    outputs: tuple[RowOutput, ...],
    *,
    batch_tokens: int,
    pool_from: int = 0,
    unseen_token: int | None = None,
    spans: Sequence[Ids] | None = None,
) -> Iterator[tuple[int, list[FloatRows]]]:
    """Run texts longest first and yield each as it is done.

    Args:
        runtime: of vectors.
        ids: int32 [tokens] of each text.
        outputs: what is computed.
        batch_tokens: tokens of a batch.
        pool_from: leading tokens of each text that are not pooled.
        unseen_token: texts end in this token, and their others do not see it.
        spans: int32 [spans, 2] of each text, which are pooled instead of the text.

    Returns:
        Pairs of a text's index and its rows of each output: float32 [1, D] for "text", or
        [spans, D], else [tokens, D].

    Raises:
        NonFiniteError: the model computed NaN or infinity; names `input[i]`.
    """
    if not ids:
        return
    order = longest_first(ids)
    packed, lengths = pack(ids, order)
    unseen = None if unseen_token is None else trailing(packed, lengths, unseen_token)
    pooled = None if spans is None else _spans([spans[i] for i in order])
    job = EmbedJob(packed, lengths, pool_from, spans=pooled, outputs=outputs, unseen=unseen)
    for piece, rows in run_job(runtime, job, order, batch_tokens=batch_tokens):
        for place in range(piece.first, piece.last):
            one = JobSlice(job, place, place + 1)
            pairs = zip(outputs, rows, strict=True)
            yield int(order[place]), [_part(piece, one, output, part) for output, part in pairs]


def run_job(
    runtime: EmbeddingRuntime, job: EmbedJob, order: Order, *, batch_tokens: int
) -> Iterator[tuple[JobSlice, list[FloatRows]]]:
    """Run the texts of a job and yield each batch as it is done.

    Args:
        runtime: of vectors or of scores.
        job: nothing of it has run.
        order: index of each of its texts among those of the caller, int64 [texts].
        batch_tokens: tokens of a batch.

    Returns:
        Pairs of some texts, in the job's order, and their rows of each of its outputs.

    Raises:
        NonFiniteError: the model computed NaN or infinity; names `input[i]`.
    """
    queue = EmbedQueue()
    queue.add(job)
    running: list[tuple[list[JobSlice], LazyTensor[Any]]] = []
    while queue or running:
        while queue and len(running) < STEPS_IN_FLIGHT:
            slices = queue.take(batch_tokens, MAX_TEXTS_PER_BATCH)
            running.append((slices, runtime.step_all(EmbedBatch.of_slices(slices))))
        (piece,), lazy = running.pop(0)
        rows = [part.numpy() for part in lazy.result()]
        for output, part in zip(job.outputs, rows, strict=True):
            check_finite(part, job.rows(output)[piece.first :], order[piece.first :])
        yield piece, rows


def longest_first(ids: Sequence[Ids]) -> Order:
    """Order texts so that those of a batch are of like length."""
    return np.argsort([-len(text) for text in ids], kind="stable")


def pack(ids: Sequence[Ids], order: Order) -> tuple[Ids, Ids]:
    """Join texts in an order: their tokens, int32 [T], and their lengths, int32 [texts]."""
    lengths = np.array([len(ids[i]) for i in order], np.int32)
    return np.concatenate([ids[i] for i in order]), lengths


def check_finite(rows: FloatRows, starts: Order, order: Order) -> None:
    """Refuse NaN and infinity.

    Args:
        rows: float32 [rows, D] of some texts.
        starts: where the rows of each of these texts begin; the first text's are the first.
        order: index of each text among those of the caller.

    Raises:
        NonFiniteError: names `input[i]`.
    """
    finite = np.isfinite(rows)
    if finite.all():
        return
    row = starts[0] + np.argmin(finite.all(axis=1))
    field = f"input[{order[np.searchsorted(starts, row, side='right') - 1]}]"
    raise NonFiniteError(f"the model computed NaN or infinity for {field}", field)


def _spans(bounds: Sequence[Ids]) -> Spans:
    return Spans(np.array([len(own) for own in bounds], np.int32), np.concatenate(bounds))


def _part(piece: JobSlice, one: JobSlice, output: RowOutput, rows: FloatRows) -> FloatRows:
    """The rows of one text among those of a slice."""
    start, own = piece.rows(output).start, one.rows(output)
    return rows[own.start - start : own.stop - start]
