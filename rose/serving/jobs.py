"""What comes over the wire as arrays, and the jobs made of it. All are int32."""

import numpy as np

from rose.runtime.errors import RequestError
from rose.runtime.queue import EmbedJob
from rose.runtime.spans import Spans
from rose.serving.protocol import EmbedRequest, ScoreRequest


def read_embed_job(request: EmbedRequest, frames: list[bytes]) -> EmbedJob:
    """Read the texts to embed, with the spans of each where the request has some.

    Raises:
        RequestError: the frames do not fit together.
    """
    job = read_job(request, frames[:2], pool_from=request.pool_from)
    spans = _read_spans(request, job, frames[2:])
    if spans is None:
        return job
    return EmbedJob(job.ids, job.lengths, job.pool_from, job.priority, spans=spans)


def _read_spans(request: EmbedRequest, job: EmbedJob, frames: list[bytes]) -> Spans | None:
    if not frames:
        fits = len(job) and job.lengths.min() > 0 and job.starts[-1] == len(job.ids)
        return Spans.tokens(job.lengths, request.per_token) if request.per_token and fits else None
    if len(frames) != 2 or request.per_token or len(frames[0]) % 4 or len(frames[1]) % 8:
        raise RequestError("expected two more frames of int32: spans per text, pairs of bounds")
    counts, bounds = (np.frombuffer(frame, np.int32) for frame in frames)
    return Spans(counts, bounds.reshape(-1, 2))


def read_job(
    request: EmbedRequest | ScoreRequest,
    frames: list[bytes],
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
