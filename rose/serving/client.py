"""The gateway's end of the wire: an asyncio client of one engine. Free of torch."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.models.card import RowOutput
from rose.runtime.options import EmbedOptions, OutputDtype, Priority, SamplingParams
from rose.serving.client_api import EmbedAnswer, EngineError, ScoreAnswer, within
from rose.serving.connection import Connection
from rose.serving.protocol import EmbedRequest, GenerateRequest, ScoreRequest, TokensDelta
from rose.serving.tracing import traceparent

NUMPY_DTYPES: dict[OutputDtype, str] = {
    "float32": "<f4",
    "float16": "<f2",
    "int8": "i1",
    "uint8": "u1",
    "binary": "i1",
    "ubinary": "u1",
}


def _joined(texts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    if len(texts) == 1:
        return np.ascontiguousarray(texts[0], np.int32)
    return np.concatenate([np.asarray(text, np.int32) for text in texts])


def _lengths(texts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.array([len(text) for text in texts], np.int32)


def _rows(
    frame: Any,  # noqa: ANN401 - ZeroMQ's buffer
    output: RowOutput,
    options: EmbedOptions,
    tokens: int,
    texts: int,
) -> npt.NDArray[np.generic]:
    if output != "text":
        return np.frombuffer(frame, "<f4").reshape(tokens, -1)
    return np.frombuffer(frame, NUMPY_DTYPES[options.output_dtype]).reshape(texts, -1)


class EngineClient(Connection):
    """Talks to the engine at one address."""

    async def embed(
        self,
        ids: Sequence[npt.NDArray[np.int32]],
        options: EmbedOptions,
        *,
        pool_from: int = 0,
        spans: Sequence[npt.NDArray[np.int32]] | None = None,
        outputs: tuple[RowOutput, ...] = ("text",),
        queries: bool = False,
        priority: Priority = "online",
        timeout_s: float | None = None,
        trace: str = "",
    ) -> EmbedAnswer:
        """Embed texts given as token ids, each int32 [tokens], or `spans` of each, int32 [n, 2].

        See `rose.serving.client_api.EngineClient.embed` for the rest.

        Cancelling the task that waits here cancels the request at the engine.

        Raises:
            EngineError: the engine refused, failed, is not there, or took longer than `timeout_s`.
        """
        request = EmbedRequest(
            request_id=next(self._request_ids),
            options=options,
            pool_from=pool_from,
            outputs=outputs,
            queries=queries,
            priority=priority,
            trace=trace,
            traceparent=traceparent(),
        )
        sent = [_lengths(ids).data, _joined(ids).data]
        if spans is not None:
            sent += [_lengths(spans).data, _joined(spans).data]
        result, frames = await within(timeout_s, self._ask(request, sent))
        tokens = sum(map(len, ids))
        texts = len(ids) if spans is None else sum(map(len, spans))
        first, *more = (
            _rows(frame, output, options, tokens, texts)
            for frame, output in zip(frames, outputs, strict=True)
        )
        return EmbedAnswer(first, result.queued_s, result.computed_s, tuple(more))

    async def score(
        self,
        ids: Sequence[npt.NDArray[np.int32]],
        segments: Sequence[npt.NDArray[np.int32]] | None = None,
        *,
        priority: Priority = "online",
        timeout_s: float | None = None,
        trace: str = "",
    ) -> ScoreAnswer:
        """Score texts, or joined pairs of texts, given as token ids, each int32 [tokens].

        `segments`, of the same lengths, say which token of a pair is of which text, for models
        that want to know. Cancelling the task that waits here cancels the request at the engine.

        Raises:
            EngineError: the engine refused, failed, is not there, or took longer than `timeout_s`.
        """
        request = ScoreRequest(
            request_id=next(self._request_ids),
            priority=priority,
            trace=trace,
            traceparent=traceparent(),
        )
        frames = [_lengths(ids).data, _joined(ids).data]
        if segments is not None:
            frames.append(_joined(segments).data)
        result, rows = await within(timeout_s, self._ask(request, frames))
        scores = np.frombuffer(rows[0], "<f4").reshape(result.count, -1)
        return ScoreAnswer(scores, queued_s=result.queued_s, computed_s=result.computed_s)

    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        *,
        priority: Priority = "online",
        trace: str = "",
    ) -> AsyncGenerator[TokensDelta, None]:
        """Continue a prompt given as token ids, int32 [tokens].

        Yields what each step brings. Closing the generator, or cancelling the task that iterates,
        cancels the request at the engine.

        Raises:
            EngineError: the engine refused, failed, or was lost.
        """
        request = GenerateRequest(
            request_id=next(self._request_ids),
            sampling=sampling,
            priority=priority,
            trace=trace,
            traceparent=traceparent(),
        )
        deltas: asyncio.Queue[TokensDelta | EngineError] = asyncio.Queue()
        self._check_ready()
        self._streams[request.request_id] = deltas
        finished = False
        try:
            self._send(request, [ids.astype(np.int32).data])
            while not finished:
                delta = await deltas.get()
                finished = isinstance(delta, EngineError) or delta.finish is not None
                if isinstance(delta, EngineError):
                    raise delta
                yield delta
        finally:
            del self._streams[request.request_id]
            if not finished:
                self._cancel(request.request_id)
