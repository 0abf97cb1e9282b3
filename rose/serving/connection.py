"""A connection to one engine: its handshake, its liveness, and what it answers. Free of torch.

It says hello whenever the engine can be reached, pings while it can, and fails what is under way
the moment the connection breaks or the engine leaves several pings unanswered.
"""

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio
from msgspec.structs import replace
from zmq.utils.monitor import recv_monitor_message

from rose.models.card import ModelCard
from rose.serving import protocol
from rose.serving.client_api import EngineError
from rose.serving.curve import NO_HANDSHAKE, Keys
from rose.serving.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    EmbedRequest,
    EmbedResult,
    Failure,
    Goodbye,
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
from rose.serving.stats import LastingStats
from rose.serving.transport import Port, check_peer, make_dealer, takes_keys

log = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0
MAX_SILENT_PINGS = 5
NO_ENTRY = zmq.EVENT_HANDSHAKE_FAILED_AUTH
GONE = "the engine has stopped"
BAD_KEY = "the engine refuses this gateway's key"
BAD_HANDSHAKE = "the keys of this gateway and of the engine do not fit, or one of them has none"

Answer = tuple[EmbedResult, list[Any]]


class Connection:
    """Reaches the engine at one address, again and again until it is closed."""

    def __init__(
        self, context: "zmq.asyncio.Context", address: str, keys: Keys | None = None
    ) -> None:
        """Make a connection, to be started. Over tcp it uses keys, if there are any.

        Raises:
            AddressError: the address cannot be used.
        """
        self.address = check_peer(address, keyed=keys is not None)
        self._card: ModelCard | None = None
        self._tokenizer_json = b""
        self._stats = LastingStats()
        self._unready_reason: str | None = "connecting to the engine"
        self._became_ready = asyncio.Event()
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._streams: dict[int, asyncio.Queue[TokensDelta | EngineError]] = {}
        self._request_ids = itertools.count(1)
        self._silent_pings = 0
        self._greeted = -math.inf  # when the last hello was sent, on the monotonic clock
        self._connected = False
        self._closing = False
        self._socket = make_dealer(context, self.address, keys)
        self._port = Port(self._socket)
        self._tasks: list[asyncio.Task[None]] = []

    # State

    @property
    def ready(self) -> bool:
        """Whether the engine has welcomed this client and answers."""
        return self._unready_reason is None

    @property
    def unready_reason(self) -> str | None:
        """Why the engine cannot be used now, None when it can."""
        return self._unready_reason

    @property
    def card(self) -> ModelCard | None:
        """The served model, None before the first handshake. It stays known after a loss."""
        return self._card

    @property
    def tokenizer_json(self) -> bytes:
        """The model's tokenizer, as its checkpoint has it."""
        return self._tokenizer_json

    @property
    def stats(self) -> Stats:
        """The engine's numbers; counters go on when it is started again."""
        return replace(self._stats.current, ready=int(self.ready))

    def start(self) -> None:
        """Connect, in the running event loop. The monitor comes first, or it could miss that."""
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | NO_HANDSHAKE | NO_ENTRY
        monitor = self._socket.get_monitor_socket(events)
        receiving = self._port.deliver(self._receive)
        loops = (receiving, self._heartbeat_loop(), self._monitor_loop(monitor))
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        self._socket.connect(self.address)

    async def wait_ready(self) -> None:
        """Wait for the first handshake."""
        await self._became_ready.wait()

    async def watch(self) -> None:
        """Wait for one of the client's own loops to fail, and raise its error."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """Fail what is under way and disconnect."""
        self._closing = True
        self._lose("the gateway is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._socket.close()

    # Requests

    def _check_ready(self) -> None:
        if self._unready_reason is not None:
            raise EngineError("unavailable", f"the engine is not ready: {self._unready_reason}")

    async def _ask(self, request: EmbedRequest | ScoreRequest, frames: Sequence[Any]) -> Answer:
        self._check_ready()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[request.request_id] = future
        try:
            self._send(request, frames)
            return await future
        except asyncio.CancelledError:
            self._cancel(request.request_id)
            raise
        finally:
            self._pending.pop(request.request_id, None)

    def _cancel(self, request_id: int) -> None:
        """Tell the engine that nobody waits; one that was lost drops all at the next hello."""
        if self.ready:
            self._send(Cancel(request_id))

    def _send(self, message: protocol.ClientMessage, frames: Sequence[Any] = ()) -> None:
        """Hand a message to the connection; if it takes none the engine is lost."""
        try:
            self._port.send([protocol.encode(message)], frames)
        except zmq.ZMQError:
            self._lose("the engine is not connected, or does not read")

    # Messages in

    def _receive(self, parts: list[zmq.Frame]) -> None:
        header, *frames = parts
        self._silent_pings = 0
        try:
            message = protocol.decode_from_engine(header.buffer)
        except protocol.ProtocolError as error:
            self._lose(f"the engine speaks another protocol: {error}")
            return
        self._handle(message, [frame.buffer for frame in frames])

    def _handle(self, message: protocol.EngineMessage, frames: list[Any]) -> None:
        if isinstance(message, EmbedResult):
            self._resolve(message.request_id, (message, frames))
        elif isinstance(message, Tokens):
            for delta in message.deltas:
                if (stream := self._streams.get(delta.request_id)) is not None:
                    stream.put_nowait(delta)
        elif isinstance(message, Failure):
            error = EngineError(message.kind, message.message, message.field)
            self._fail(message.request_id, error)
        elif isinstance(message, Pong):
            self._stats.update(message.stats)
            if self._unready_reason is not None:
                self._greet()  # it was given up for silent, but lives
        elif isinstance(message, Welcome):
            self._welcomed(message, b"".join(frames))
        elif isinstance(message, Refused | Goodbye):
            self._declined(message)

    def _resolve(self, request_id: int, answer: Answer) -> None:
        future = self._pending.get(request_id)
        if future is not None and not future.done():  # or it was cancelled meanwhile
            future.set_result(answer)

    def _fail(self, request_id: int, error: EngineError) -> None:
        future = self._pending.get(request_id)
        if future is not None and not future.done():
            future.set_exception(error)
        elif (stream := self._streams.get(request_id)) is not None:
            stream.put_nowait(error)

    def _welcomed(self, message: Welcome, tokenizer_json: bytes) -> None:
        if not self._connected:
            return  # the last words of a connection that broke
        self._card, self._tokenizer_json = message.card, tokenizer_json
        self._unready_reason = None
        self._became_ready.set()
        log.info("engine at %s: ready, it serves %s", self.address, message.card.name)

    def _declined(self, message: Refused | Goodbye) -> None:
        if isinstance(message, Goodbye):
            self._left()
        elif message.protocol == PROTOCOL_VERSION:
            self._greet()  # a new engine at the same address that does not know this client
        else:
            self._speaks_another(message)

    def _speaks_another(self, message: Refused) -> None:
        reason = (
            f"the engine speaks version {message.protocol} of the protocol, "
            f"this gateway version {PROTOCOL_VERSION}"
        )
        if reason != self._unready_reason:
            log.error("engine at %s: %s", self.address, reason)
        self._lose(reason)

    def _left(self) -> None:
        """Take leave of an engine that stops; that its connection ends then is no news."""
        if self.ready:
            log.info("engine at %s: has stopped", self.address)
        self._unready_reason = GONE
        self._lose(GONE)

    # Liveness

    def _greet(self) -> None:
        """Say hello, once per interval at most: the answer to the last one may be on its way."""
        self._lose("the engine has not finished loading, or does not answer")
        now = time.monotonic()
        if now - self._greeted >= PING_INTERVAL_S:
            self._greeted = now
            self._send(Hello(PROTOCOL_VERSION, f"gateway-{os.getpid()}"))

    def _lose(self, reason: str) -> None:
        """Mark the engine as unusable and fail what waits for it."""
        if self._unready_reason is None and not self._closing:
            log.warning("engine at %s: %s", self.address, reason)
        self._unready_reason = reason
        for request_id in [*self._pending, *self._streams]:
            self._fail(request_id, EngineError("unavailable", f"the engine was lost: {reason}"))

    async def _heartbeat_loop(self) -> None:
        """Ping, and count what stays unanswered: time in which this process stood still is not."""
        for sequence in itertools.count(1):
            await asyncio.sleep(PING_INTERVAL_S)
            if not self._connected:
                continue
            if self.ready and self._silent_pings >= MAX_SILENT_PINGS:
                self._lose(f"no sign of life for {self._silent_pings * PING_INTERVAL_S:.0f} s")
            self._silent_pings += 1
            self._send(Ping(sequence))

    async def _monitor_loop(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            await self._read_out()
            self._connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._greeted = -math.inf
            self._silent_pings = 0
            if self._connected:
                self._greet()
            else:
                self._stats.lost()
                self._disconnected(event["event"])

    def _disconnected(self, event: int) -> None:
        """Note why there is no connection; keys that do not fit are said in the log, once."""
        if event == zmq.EVENT_DISCONNECTED or not takes_keys(self.address):
            if self._unready_reason not in (BAD_KEY, BAD_HANDSHAKE):  # the cause, just told
                self._lose("the connection to the engine broke")
            return
        reason = BAD_KEY if event == NO_ENTRY else BAD_HANDSHAKE
        if reason != self._unready_reason:
            log.error("engine at %s: %s", self.address, reason)
        self._lose(reason)

    async def _read_out(self) -> None:
        """Let the receive loop take in what had arrived before the connection broke."""
        while self._port.has_messages():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
