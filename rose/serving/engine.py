"""The engine process: one model, its runtimes, and the socket that requests come in by.

One asyncio loop receives, admits and answers; the model runs on the runtime's own thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from msgspec.structs import replace

from rose.runtime.build import ModelOptions, ServedModel, build
from rose.runtime.errors import NonFiniteError, RequestError
from rose.runtime.queue import EmbedJob
from rose.serving import protocol
from rose.serving.embed_service import EmbedService, FinishedEmbed, OverloadedError
from rose.serving.generate_service import GenerateService, Key
from rose.serving.process import beat, stop_event
from rose.serving.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    EmbedRequest,
    EmbedResult,
    EngineMessage,
    Failure,
    FailureKind,
    GenerateRequest,
    Hello,
    Ping,
    Pong,
    Refused,
    Stats,
    Tokens,
    TokensDelta,
    Welcome,
)
from rose.serving.transport import bind_router, check_address

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 15.0
LAST_WORDS_MS = 200  # time for the last answers to leave the socket


@dataclass(slots=True)
class Client:
    """A connected gateway: when it was last heard, and how to cancel its requests under way."""

    last_seen: float = field(default_factory=time.monotonic)
    requests: dict[int, Callable[[], None]] = field(default_factory=dict)


class EngineServer:
    """Answers clients on a ROUTER socket."""

    def __init__(
        self, socket: "zmq.asyncio.Socket", served: ServedModel, *, max_queue_tokens: int = 1 << 22
    ) -> None:
        """Serve `served` on a bound socket; more than `max_queue_tokens` waiting is refused."""
        self._socket = socket
        self._served = served
        self._generate = (
            GenerateService(served.generation, self._send_tokens, self._send_failure)
            if served.generation
            else None
        )
        self._embed = EmbedService(served, max_queue_tokens=max_queue_tokens)
        self._clients: dict[bytes, Client] = {}
        self._draining = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then finish what was admitted and return."""
        loops = [self._receive_loop, self._embed.run, self._watch_clients, beat]
        if self._generate:
            loops.append(self._generate.run)
        tasks = [asyncio.create_task(loop()) for loop in loops]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            self._draining = True
            for task in done - {stopping}:
                task.result()  # a loop only ends by an error
            while self._requests:
                await asyncio.sleep(0.01)
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)

    @property
    def _requests(self) -> int:
        return self._embed.requests + (self._generate.requests if self._generate else 0)

    # Messages in

    async def _receive_loop(self) -> None:
        while True:
            identity, header, *frames = await self._socket.recv_multipart()
            try:
                message = protocol.decode_from_client(header)
            except msgspec.DecodeError as error:
                log.warning("dropped a message that is not of the protocol: %s", error)
                continue
            await self._dispatch(identity, message, frames)

    async def _dispatch(
        self, identity: bytes, message: protocol.ClientMessage, frames: list[bytes]
    ) -> None:
        client = self._clients.get(identity)
        if isinstance(message, Hello):
            await self._welcome(identity, message)
        elif client is None:
            await self._send(identity, Refused(PROTOCOL_VERSION, "say hello first"))
        else:
            client.last_seen = time.monotonic()
            await self._handle(identity, client, message, frames)

    async def _handle(
        self,
        identity: bytes,
        client: Client,
        message: protocol.ClientMessage,
        frames: list[bytes],
    ) -> None:
        if isinstance(message, Ping):
            await self._send(identity, Pong(message.sequence, self._stats()))
        elif isinstance(message, Cancel):
            self._cancel(client, message.request_id)
        elif isinstance(message, EmbedRequest | GenerateRequest):
            try:
                self._admit(identity, client, message, frames)
            except Exception as error:  # noqa: BLE001 - every request gets an answer
                await self._send(identity, _failure(message.request_id, error))

    async def _welcome(self, identity: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            reason = f"this engine speaks version {PROTOCOL_VERSION}, the client {hello.protocol}"
            await self._send(identity, Refused(PROTOCOL_VERSION, reason))
            return
        self._drop(identity)
        self._clients[identity] = Client()
        welcome = Welcome(PROTOCOL_VERSION, self._served.card)
        await self._send(identity, welcome, [self._served.loaded.tokenizer_json])

    def _admit(
        self,
        identity: bytes,
        client: Client,
        request: EmbedRequest | GenerateRequest,
        frames: list[bytes],
    ) -> None:
        if self._draining:
            raise DrainingError("the engine is shutting down")
        if isinstance(request, GenerateRequest):
            self._admit_generation(identity, client, request, frames)
        else:
            self._admit_embedding(identity, client, request, frames)

    def _admit_embedding(
        self, identity: bytes, client: Client, request: EmbedRequest, frames: list[bytes]
    ) -> None:
        job = _read_job(request, frames)

        async def deliver(outcome: FinishedEmbed | Exception) -> None:
            client.requests.pop(request.request_id, None)
            await self._answer(identity, request.request_id, outcome)

        self._embed.submit(job, request.options, deliver)
        client.requests[request.request_id] = lambda: self._embed.cancel(job)

    def _admit_generation(
        self, identity: bytes, client: Client, request: GenerateRequest, frames: list[bytes]
    ) -> None:
        service = self._generate
        if service is None:
            raise RequestError(f"model {self._served.card.name!r} cannot generate", "model")
        if len(frames) != 1 or len(frames[0]) % 4:
            raise RequestError("expected one frame of int32: the prompt's ids")
        key = Key(identity, request.request_id)
        ids = np.frombuffer(frames[0], np.int32)
        service.submit(key, ids, request.sampling, request.priority)
        client.requests[request.request_id] = lambda: service.cancel(key)

    def _cancel(self, client: Client, request_id: int) -> None:
        cancel = client.requests.pop(request_id, None)
        if cancel is not None:
            cancel()

    async def _watch_clients(self) -> None:
        """Drop the work of clients that fell silent."""
        while True:
            await asyncio.sleep(CLIENT_TIMEOUT_S / 4)
            limit = time.monotonic() - CLIENT_TIMEOUT_S
            for identity in [i for i, client in self._clients.items() if client.last_seen < limit]:
                self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        client = self._clients.pop(identity, None)
        if client is not None:
            for request_id in list(client.requests):
                self._cancel(client, request_id)

    # Messages out

    async def _answer(
        self, identity: bytes, request_id: int, outcome: FinishedEmbed | Exception
    ) -> None:
        if isinstance(outcome, Exception):
            await self._send(identity, _failure(request_id, outcome))
            return
        result = EmbedResult(
            request_id=request_id,
            count=len(outcome.vectors),
            row_bytes=outcome.vectors[0].nbytes,
            queued_s=outcome.queued_s,
            computed_s=outcome.computed_s,
        )
        await self._send(identity, result, [outcome.vectors.data])

    async def _send_tokens(self, identity: bytes, deltas: list[TokensDelta]) -> None:
        client = self._clients.get(identity)
        for delta in deltas:
            if delta.finish is not None and client is not None:
                client.requests.pop(delta.request_id, None)
        await self._send(identity, Tokens(deltas))

    async def _send_failure(self, key: Key, error: Exception) -> None:
        client = self._clients.get(key.client)
        if client is not None:
            client.requests.pop(key.request_id, None)
        await self._send(key.client, _failure(key.request_id, error))

    async def _send(
        self, identity: bytes, message: EngineMessage, frames: Sequence[Any] = ()
    ) -> None:
        parts = [identity, protocol.encode(message), *frames]
        try:
            await self._socket.send_multipart(parts, copy=not frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(identity)

    def _stats(self) -> Stats:
        stats = Stats(
            requests_running=self._requests,
            requests_queued=len(self._embed.queue),
            tokens_queued=self._embed.queue.tokens,
            steps=self._embed.steps,
            tokens=self._embed.tokens,
        )
        if self._generate is None:
            return stats
        numbers = asdict(self._generate.loop.stats())
        numbers["steps"] += stats.steps
        numbers["tokens"] += stats.tokens
        return replace(stats, **numbers)


def run_engine(options: ModelOptions, address: str) -> None:
    """Load a model, serve it at `address`, and return once a signal asked to stop.

    Raises:
        ValueError: the model, an option or the address cannot be used.
    """
    check_address(address)
    served = build(options)
    try:
        asyncio.run(_serve(served, address))
    finally:
        served.close()


async def _serve(served: ServedModel, address: str) -> None:
    stop = stop_event()
    context = zmq.asyncio.Context()
    try:
        with bind_router(context, address) as socket:
            log.info("ready at %s", address)
            await EngineServer(socket, served).run(stop)
    finally:
        context.destroy(linger=LAST_WORDS_MS)
    log.info("stopped")


class DrainingError(RuntimeError):
    """The engine takes no more work."""


_KINDS: tuple[tuple[type[Exception], FailureKind], ...] = (
    (RequestError, "bad_request"),
    (OverloadedError, "overloaded"),
    (NonFiniteError, "non_finite"),
    (DrainingError, "unavailable"),
)


def _failure(request_id: int, error: Exception) -> Failure:
    kind: FailureKind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), "internal")
    field = error.field if isinstance(error, RequestError | NonFiniteError) else None
    return Failure(request_id=request_id, kind=kind, message=str(error), field=field)


def _read_job(request: EmbedRequest, frames: list[bytes]) -> EmbedJob:
    if len(frames) != 2 or any(len(frame) % 4 for frame in frames):
        raise RequestError("expected two frames of int32: lengths and ids")
    lengths, ids = (np.frombuffer(frame, np.int32) for frame in frames)
    return EmbedJob(ids, lengths, request.pool_from, request.priority)
