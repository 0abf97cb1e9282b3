"""Packed texts through a runtime of this process: a row of numbers for each."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.errors import NonFiniteError
from rose.runtime.queue import EmbedJob, EmbedQueue, JobSlice

if TYPE_CHECKING:
    from rose.runtime.lazy import LazyTensor

Ids = npt.NDArray[np.int32]
Progress = Callable[[int, int], None]

MAX_TEXTS_PER_BATCH = 1024
STEPS_IN_FLIGHT = 2


def run_rows(
    runtime: EmbeddingRuntime,
    ids: Sequence[Ids],
    *,
    width: int,
    batch_tokens: int,
    skip: int = 0,
    segments: Sequence[Ids] | None = None,
    progress: Progress | None = None,
) -> npt.NDArray[np.float32]:
    """Run texts longest first, so that those of a batch are of like length.

    Where the runtime computes common beginnings once they run in order: neighbours begin alike.

    Args:
        runtime: of vectors or of scores.
        ids: int32 [tokens] of each text, at least one text.
        width: numbers of a row.
        batch_tokens: tokens of a batch.
        skip: leading tokens of each text that are not pooled.
        segments: of which text of a pair each token is, for models that want to know.
        progress: called with (texts done, texts in all) as batches finish.

    Returns:
        float32 [texts, width].

    Raises:
        NonFiniteError: the model computed NaN or infinity; names `input[i]`.
    """
    if len(ids) == 1:  # nothing to put in order
        batch = EmbedBatch(
            ids[0],
            np.array([len(ids[0])], np.int32),
            np.array([skip], np.int32),
            None if segments is None else segments[0],
        )
        rows: npt.NDArray[np.float32] = runtime.step(batch).result().numpy()
        if progress:
            progress(1, 1)
    else:
        rows = _run_sorted(runtime, ids, width, batch_tokens, skip, segments, progress)
    _check_finite(rows)
    return rows


def _run_sorted(
    runtime: EmbeddingRuntime,
    ids: Sequence[Ids],
    width: int,
    batch_tokens: int,
    skip: int,
    segments: Sequence[Ids] | None,
    progress: Progress | None,
) -> npt.NDArray[np.float32]:
    lengths = np.array([len(text) for text in ids], np.int32)
    order = np.argsort(-lengths, kind="stable")
    if runtime.shares_prefixes:
        order = np.arange(len(ids))
    job = EmbedJob(np.concatenate([ids[i] for i in order]), lengths[order], skip)
    if segments is not None:
        job.segments = np.concatenate([segments[i] for i in order])
    queue = EmbedQueue()
    queue.add(job)
    rows = np.empty((len(ids), width), np.float32)
    running: list[tuple[list[JobSlice], LazyTensor[Any]]] = []
    done = 0
    while queue or running:
        while queue and len(running) < STEPS_IN_FLIGHT:
            slices = queue.take(batch_tokens, MAX_TEXTS_PER_BATCH)
            running.append((slices, runtime.step(EmbedBatch.of_slices(slices))))
        (piece,), lazy = running.pop(0)
        rows[order[piece.first : piece.last]] = lazy.result().numpy()
        done += piece.last - piece.first
        if progress:
            progress(done, len(ids))
    return rows


def _check_finite(rows: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(rows).all():
        field = f"input[{np.flatnonzero(~np.isfinite(rows).all(axis=1))[0]}]"
        raise NonFiniteError(f"the model computed NaN or infinity for {field}", field)
