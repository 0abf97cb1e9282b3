"""What comes over the wire as arrays, and the jobs made of it. All are int32."""

from dataclasses import replace

import numpy as np

from rose.models.card import EmbeddingCard
from rose.runtime.errors import RequestError
from rose.runtime.queue import EmbedJob, IntArray
from rose.runtime.spans import Spans, first_rows
from rose.serving.protocol import EmbedRequest, ScoreRequest


def read_embed_job(
    request: EmbedRequest, frames: list[memoryview], card: EmbeddingCard | None = None
) -> EmbedJob:
    """Read the texts to embed, with the spans of each where the request has some.

    Raises:
        RequestError: the frames do not fit together, or the outputs are none or repeat.
    """
    outputs = request.outputs
    if not outputs or len(set(outputs)) < len(outputs):
        raise RequestError("each output may be asked for once, and one has to be", "output_types")
    job = read_job(request, frames[:2], pool_from=request.pool_from)
    job.outputs = outputs
    if len(frames) == 2 and not request.queries:
        return job
    if not len(job) or job.lengths.min() < 1 or job.starts[-1] != len(job.ids):
        return job  # which is refused
    spans = _read_spans(frames[2:])
    if spans is not None and outputs != ("text",):
        raise RequestError("outputs of tokens go without spans")
    return replace(job, spans=spans, unseen=_unseen(job, card) if request.queries else None)


def _read_spans(frames: list[memoryview]) -> Spans | None:
    if not frames:
        return None
    if len(frames) != 2 or len(frames[0]) % 4 or len(frames[1]) % 8:
        raise RequestError("expected two more frames of int32: spans per text, pairs of bounds")
    counts, bounds = (np.frombuffer(frame, np.int32) for frame in frames)
    return Spans(counts, bounds.reshape(-1, 2))


def _unseen(job: EmbedJob, card: EmbeddingCard | None) -> IntArray | None:
    """Count the tokens that each query is filled up with, where the others do not see them."""
    expansion = card.late.expansion if card and card.late else None
    if expansion is None or expansion.attend:
        return None
    return trailing(job.ids, job.lengths, expansion.token)


def trailing(ids: IntArray, lengths: IntArray, token: int) -> IntArray | None:
    """Count how often a token stands at the end of each text, int32 [B], its first one aside.

    None where it ends no text.
    """
    starts = first_rows(lengths)
    places = np.where(ids == token, -1, np.arange(len(ids)))
    last = np.maximum(np.maximum.reduceat(places, starts[:-1]), starts[:-1])
    counts = (starts[1:] - 1 - last).astype(np.int32)
    return counts if counts.any() else None


def read_job(
    request: EmbedRequest | ScoreRequest,
    frames: list[memoryview],
    *,
    pool_from: int = 0,
    optional: int = 0,
) -> EmbedJob:
    """Read packed texts: lengths, ids, and `optional` more frames, the segment of each id.

    Raises:
        RequestError: the frames do not fit together.
    """
    if not 2 <= len(frames) <= 2 + optional or any(len(frame) % 4 for frame in frames):
        raise RequestError("expected frames of int32: lengths and ids")
    lengths, ids, *segments = (np.frombuffer(frame, np.int32) for frame in frames)
    job = EmbedJob(ids, lengths, pool_from, request.priority)
    job.segments = segments[0] if segments else None
    return job
