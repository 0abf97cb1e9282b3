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
    lengths = np.array([len(text) for text in ids], np.int32)
    order = np.argsort(-lengths, kind="stable")
    packed, lengths = np.concatenate([ids[i] for i in order]), lengths[order]
    unseen = None if unseen_token is None else trailing(packed, lengths, unseen_token)
    pooled = None if spans is None else _spans([spans[i] for i in order])
    queue = EmbedQueue()
    queue.add(EmbedJob(packed, lengths, pool_from, spans=pooled, outputs=outputs, unseen=unseen))
    running: list[tuple[list[JobSlice], LazyTensor[Any]]] = []
    while queue or running:
        while queue and len(running) < STEPS_IN_FLIGHT:
            slices = queue.take(batch_tokens, MAX_TEXTS_PER_BATCH)
            running.append((slices, runtime.step_all(EmbedBatch.of_slices(slices))))
        (piece,), lazy = running.pop(0)
        rows = [part.numpy() for part in lazy.result()]
        for place in range(piece.first, piece.last):
            one = JobSlice(piece.job, place, place + 1)
            pairs = zip(outputs, rows, strict=True)
            parts = [_part(piece, one, output, part) for output, part in pairs]
            _check_finite(int(order[place]), parts)
            yield int(order[place]), parts


def _spans(bounds: Sequence[Ids]) -> Spans:
    return Spans(np.array([len(own) for own in bounds], np.int32), np.concatenate(bounds))


def _part(piece: JobSlice, one: JobSlice, output: RowOutput, rows: FloatRows) -> FloatRows:
    """The rows of one text among those of a slice."""
    start, own = piece.rows(output).start, one.rows(output)
    return rows[own.start - start : own.stop - start]


def _check_finite(index: int, parts: Sequence[FloatRows]) -> None:
    if not all(np.isfinite(part).all() for part in parts):
        field = f"input[{index}]"
        raise NonFiniteError(f"the model computed NaN or infinity for {field}", field)
