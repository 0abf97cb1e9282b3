"""Packed texts through a runtime of this process: a row of numbers for each."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.queue import EmbedJob
from rose.serving.local_outputs import FloatRows, Ids, check_finite, longest_first, pack, run_job

Progress = Callable[[int, int], None]

_FIRST = np.zeros(1, np.int64)  # where the row of a lone text begins, and the index of the text


def run_rows(
    runtime: EmbeddingRuntime,
    ids: Sequence[Ids],
    *,
    width: int,
    batch_tokens: int,
    skip: int = 0,
    segments: Sequence[Ids] | None = None,
    progress: Progress | None = None,
) -> FloatRows:
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
    if len(ids) == 1:
        rows = _run_one(runtime, ids[0], skip, None if segments is None else segments[0])
        if progress:
            progress(1, 1)
        return rows
    order = np.arange(len(ids)) if runtime.shares_prefixes else longest_first(ids)
    job = EmbedJob(*pack(ids, order), skip)
    if segments is not None:
        job.segments = np.concatenate([segments[i] for i in order])
    rows = np.empty((len(ids), width), np.float32)
    for piece, (part,) in run_job(runtime, job, order, batch_tokens=batch_tokens):
        rows[order[piece.first : piece.last]] = part
        if progress:
            progress(piece.last, len(ids))
    return rows


def in_order(
    outcomes: Iterable[tuple[int, list[FloatRows]]], texts: int, progress: Progress | None
) -> list[list[FloatRows]]:
    """Collect what `run_outputs` yields: the rows of each text, in the order of the texts."""
    found: dict[int, list[FloatRows]] = {}
    for index, parts in outcomes:
        found[index] = parts
        if progress:
            progress(len(found), texts)
    return [found[index] for index in range(texts)]


def _run_one(runtime: EmbeddingRuntime, ids: Ids, skip: int, segments: Ids | None) -> FloatRows:
    """Run a text without the queue: there is nothing to put in order."""
    lengths, pool_from = np.array([len(ids)], np.int32), np.array([skip], np.int32)
    rows: FloatRows = runtime.step(EmbedBatch(ids, lengths, pool_from, segments)).result().numpy()
    check_finite(rows, _FIRST, _FIRST)
    return rows
