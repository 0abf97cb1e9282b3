"""The engine: one model, its runtimes, and the socket that requests come in by.

One asyncio loop receives, admits and answers; the model runs on the runtime's own thread. Nothing
that is sent waits: a client that does not read is dropped instead.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from msgspec.structs import replace

from rose.runtime.build import ServedModel
from rose.runtime.errors import NonFiniteError, RequestError
from rose.serving import protocol, tracing
from rose.serving.embed_service import EmbedService, FinishedEmbed, OverloadedError
from rose.serving.generate_service import GenerateService, Key
from rose.serving.graph_grids import graph_counts, graph_grids
from rose.serving.jobs import read_embed_job, read_job
from rose.serving.process import beat
from rose.serving.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    EmbedRequest,
    EmbedResult,
    EngineMessage,
    Failure,
    FailureKind,
    GenerateRequest,
    Goodbye,
    GraphsRequest,
    GraphsResult,
    Hello,
    Ping,
    Pong,
    Refused,
    ScoreRequest,
    Stats,
    Tokens,
    TokensDelta,
    Welcome,
)
from rose.serving.repeated import RepeatedWarning
from rose.serving.score_service import ScoreService
from rose.serving.transport import Port

log = logging.getLogger(__name__)
_unknown = RepeatedWarning(log, "dropped a message that is not of the protocol: %s")

SILENCE_CHECK_S = 5.0
SILENT_CHECKS = 3  # in a row, and a client's work is dropped
STEP_CHECK_S = 10.0
STEP_LIMIT_S = 600.0  # as long as a request may take by default
DRAIN_LIMIT_S = 60.0


class DrainingError(RuntimeError):
    """The engine takes no more work."""


class EngineFailedError(RuntimeError):
    """The engine cannot go on."""


@dataclass(slots=True)
class Work:
    """A request under way: how to cancel it, and what the gateway knows it by."""

    cancel: Callable[[], None]
    trace: str
    traceparent: str
    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None


@dataclass(slots=True)
class Client:
    """A connected gateway: for how many checks it has been silent, and its requests under way."""

    silent_checks: int = 0
    requests: dict[int, Work] = field(default_factory=dict)


class EngineServer:
    """Answers clients on a ROUTER socket."""

    def __init__(
        self, socket: "zmq.asyncio.Socket", served: ServedModel, *, max_queue_tokens: int = 1 << 22
    ) -> None:
        """Serve `served` on a bound socket; more than `max_queue_tokens` waiting is refused."""
        self._port = Port(socket)
        self._served = served
        self._generate = (
            GenerateService(served.generation, self._send_tokens, self._fail_generation)
            if served.generation
            else None
        )
        self._embed = EmbedService(served, max_queue_tokens=max_queue_tokens)
        self._score = ScoreService(served, max_queue_tokens=max_queue_tokens)
        self._clients: dict[bytes, Client] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._draining = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then finish what was admitted and return.

        What is not done within a limit then ends with an error.

        Raises:
            EngineFailedError: a fault that no request can be blamed for.
        """
        loops = [self._receive_loop, self._embed.run, self._score.run]
        loops += [self._watch_clients, self._watch_steps, beat]
        if self._generate:
            loops.append(self._generate.run)
        self._loops = [asyncio.create_task(loop()) for loop in loops]
        try:
            await self._unless_failed(stop.wait())
            self._draining = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_LIMIT_S):
                    await self._unless_failed(self._idle())
            self._give_up()
            for identity in list(self._clients):
                self._send(identity, Goodbye())
        finally:
            for task in self._loops:
                task.cancel()
            await asyncio.gather(*self._loops, return_exceptions=True)

    async def _unless_failed(self, awaited: Coroutine[Any, Any, object]) -> None:
        """Wait for something, or for a loop to end, which it only does by an error."""
        task = asyncio.create_task(awaited)
        try:
            await asyncio.wait([task, *self._loops], return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        for loop in self._loops:
            if loop.done() and (error := loop.exception()) is not None:
                raise EngineFailedError(f"the engine failed: {error}") from error

    async def _idle(self) -> None:
        while self._requests:
            await asyncio.sleep(0.01)

    def _give_up(self) -> None:
        """Fail what could not be finished in time."""
        if not self._requests:
            return
        log.warning("%d requests were not done in time", self._requests)
        for identity, client in list(self._clients.items()):
            for request_id, work in list(client.requests.items()):
                work.cancel()
                self._send(identity, _failure(request_id, DrainingError("the engine has stopped")))

    @property
    def _requests(self) -> int:
        packed = self._embed.requests + self._score.requests
        return packed + (self._generate.requests if self._generate else 0)

    # Messages in

    async def _receive_loop(self) -> None:
        await self._port.deliver(self._receive)

    def _receive(self, parts: list[zmq.Frame]) -> None:
        identity, header, *frames = parts
        try:
            message = protocol.decode_from_client(header.buffer)
        except protocol.ProtocolError as error:
            _unknown.note(error)
            return
        self._dispatch(identity.bytes, message, [frame.buffer for frame in frames])

    def _dispatch(
        self, identity: bytes, message: protocol.ClientMessage, frames: list[memoryview]
    ) -> None:
        client = self._clients.get(identity)
        if isinstance(message, Hello):
            self._welcome(identity, message)
        elif client is None:
            self._send(identity, Refused(PROTOCOL_VERSION, "say hello first"))
        else:
            client.silent_checks = 0
            self._handle(identity, client, message, frames)

    def _handle(
        self,
        identity: bytes,
        client: Client,
        message: protocol.ClientMessage,
        frames: list[memoryview],
    ) -> None:
        if isinstance(message, Ping):
            self._send(identity, Pong(message.sequence, self._stats()))
        elif isinstance(message, Cancel):
            self._cancel(client, message.request_id)
        elif isinstance(message, GraphsRequest):
            self._send(identity, GraphsResult(graph_grids(self._served.graphs)))
        elif isinstance(message, EmbedRequest | ScoreRequest | GenerateRequest):
            try:
                self._admit(identity, client, message, frames)
            except Exception as error:  # noqa: BLE001 - every request gets an answer
                self._fail(identity, message.request_id, message.trace, error)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            reason = f"this engine speaks version {PROTOCOL_VERSION}, the client {hello.protocol}"
            self._send(identity, Refused(PROTOCOL_VERSION, reason))
            return
        self._drop(identity)  # what it asked for before, it does not wait for any more
        self._clients[identity] = Client()
        log.info("%.60r has connected", hello.client)
        welcome = Welcome(PROTOCOL_VERSION, self._served.card)
        self._send(identity, welcome, [self._served.loaded.tokenizer_json])

    def _admit(
        self,
        identity: bytes,
        client: Client,
        request: EmbedRequest | ScoreRequest | GenerateRequest,
        frames: list[memoryview],
    ) -> None:
        if self._draining:
            raise DrainingError("the engine is shutting down")
        if request.request_id in client.requests:
            raise RequestError(f"request {request.request_id} is under way already")
        if isinstance(request, GenerateRequest):
            cancel = self._admit_generation(identity, request, frames)
        elif isinstance(request, ScoreRequest):
            cancel = self._admit_scoring(identity, request, frames)
        else:
            cancel = self._admit_embedding(identity, request, frames)
        client.requests[request.request_id] = Work(cancel, request.trace, request.traceparent)

    def _admit_embedding(
        self, identity: bytes, request: EmbedRequest, frames: list[memoryview]
    ) -> Callable[[], None]:
        job = read_embed_job(request, frames, self._served.card.embedding)
        self._embed.submit(job, request.options, partial(self._answer, identity, request, len(job)))
        return partial(self._embed.cancel, job)

    def _admit_scoring(
        self, identity: bytes, request: ScoreRequest, frames: list[memoryview]
    ) -> Callable[[], None]:
        job = read_job(request, frames, optional=1)
        self._score.submit_texts(job, partial(self._answer, identity, request, len(job)))
        return partial(self._score.cancel, job)

    def _admit_generation(
        self, identity: bytes, request: GenerateRequest, frames: list[memoryview]
    ) -> Callable[[], None]:
        if self._generate is None:
            raise RequestError(f"model {self._served.card.name!r} cannot generate", "model")
        if len(frames) != 1 or len(frames[0]) % 4:
            raise RequestError("expected one frame of int32: the prompt's ids")
        key = Key(identity, request.request_id)
        ids = np.frombuffer(frames[0], np.int32)
        self._generate.submit(key, ids, request.sampling, request.priority)
        return partial(self._generate.cancel, key)

    def _cancel(self, client: Client, request_id: int) -> None:
        work = client.requests.pop(request_id, None)
        if work is not None:
            work.cancel()

    async def _watch_clients(self) -> None:
        """Drop the work of clients that fell silent.

        Checks are counted and not seconds: when this process is paused, nobody is to blame.
        """
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            for identity, client in list(self._clients.items()):
                client.silent_checks += 1
                if client.silent_checks > SILENT_CHECKS:
                    log.warning("a client has been silent for too long: its work is dropped")
                    self._drop(identity)

    async def _watch_steps(self) -> None:
        """End the engine when requests wait and no step gets done: the device hangs."""
        before, checks = -1, 0
        while True:
            await asyncio.sleep(STEP_CHECK_S)
            steps = self._stats().steps
            checks = checks + 1 if self._requests and steps == before else 0
            before = steps
            if checks * STEP_CHECK_S >= STEP_LIMIT_S:
                raise RuntimeError(f"the step has not ended for {STEP_LIMIT_S:.0f} seconds")

    def _drop(self, identity: bytes) -> None:
        client = self._clients.pop(identity, None)
        if client is not None:
            for request_id in list(client.requests):
                self._cancel(client, request_id)

    # Messages out

    def _answer(
        self,
        identity: bytes,
        request: EmbedRequest | ScoreRequest,
        texts: int,
        outcome: FinishedEmbed | Exception,
    ) -> None:
        self._forget(identity, request.request_id)
        if isinstance(outcome, Exception):
            self._fail(identity, request.request_id, request.trace, outcome)
            return
        tracing.record(
            "queue", outcome.queued_s, ago=outcome.computed_s, parent=request.traceparent
        )
        tracing.record("forward", outcome.computed_s, parent=request.traceparent, texts=texts)
        result = EmbedResult(
            request_id=request.request_id,
            count=len(outcome.vectors),
            row_bytes=outcome.vectors[0].nbytes,
            queued_s=outcome.queued_s,
            computed_s=outcome.computed_s,
        )
        self._send(identity, result, [rows.data for rows in (outcome.vectors, *outcome.more)])

    def _send_tokens(self, identity: bytes, deltas: list[TokensDelta]) -> None:
        for delta in deltas:
            if tracing.is_on():
                self._trace(identity, delta)
            if delta.finish is not None:
                self._forget(identity, delta.request_id)
        self._send(identity, Tokens(deltas))

    def _trace(self, identity: bytes, delta: TokensDelta) -> None:
        """Record a generation in two parts: up to its first tokens, and from there on."""
        client = self._clients.get(identity)
        work = client.requests.get(delta.request_id) if client is not None else None
        if work is None:
            return
        now = time.monotonic()
        if work.first_token is None:
            work.first_token = now
            tracing.record("queue and prefill", now - work.arrived, parent=work.traceparent)
        if delta.finish is not None:
            tracing.record("decode", now - work.first_token, parent=work.traceparent)

    def _fail_generation(self, key: Key, error: Exception) -> None:
        work = self._forget(key.client, key.request_id)
        self._fail(key.client, key.request_id, work.trace if work else "", error)

    def _forget(self, identity: bytes, request_id: int) -> Work | None:
        client = self._clients.get(identity)
        return client.requests.pop(request_id, None) if client is not None else None

    def _fail(self, identity: bytes, request_id: int, trace: str, error: Exception) -> None:
        failure = _failure(request_id, error)
        if failure.kind in ("internal", "non_finite"):
            log.error("request %s failed: %s", trace, error, extra={"request_id": trace})
        self._send(identity, failure)

    def _send(self, identity: bytes, message: EngineMessage, frames: Sequence[Any] = ()) -> None:
        """Send a message; a client that is gone, or that does not read, is dropped."""
        try:
            self._port.send([identity, protocol.encode(message)], frames)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            client = self._clients.get(identity)
            if client is not None and client.requests:
                why = "is gone" if error.errno == zmq.EHOSTUNREACH else "does not read"
                log.info("a client %s: its work is dropped", why)
            self._drop(identity)

    def _stats(self) -> Stats:
        packed = (self._embed, self._score)
        queued = sum(service.queue.untouched for service in packed)
        queued += self._generate.queued if self._generate else 0
        stats = Stats(
            requests_running=self._requests - queued,
            requests_queued=queued,
            tokens_queued=sum(service.queue.tokens for service in packed),
            steps=sum(service.steps for service in packed),
            tokens=sum(service.tokens for service in packed),
            **graph_counts(self._served.graphs.values()),
        )
        if self._generate is None:
            return stats
        numbers = asdict(self._generate.loop.stats())
        numbers["steps"] += stats.steps
        numbers["tokens"] += stats.tokens
        return replace(stats, **numbers)


_KINDS: tuple[tuple[type[Exception], FailureKind], ...] = (
    (RequestError, "bad_request"),
    (OverloadedError, "overloaded"),
    (NonFiniteError, "non_finite"),
    (DrainingError, "unavailable"),
)


def _failure(request_id: int, error: Exception) -> Failure:
    kind: FailureKind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), "internal")
    field = error.field if isinstance(error, RequestError | NonFiniteError) else None
    message = str(error).encode(errors="replace").decode()  # half a surrogate pair cannot be sent
    return Failure(request_id=request_id, kind=kind, message=message, field=field)
