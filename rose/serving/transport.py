"""ZeroMQ sockets with the options that ROSE relies on, and the addresses it allows."""

import asyncio
import contextlib
import os
import socket as sockets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import zmq
import zmq.asyncio

from rose.serving.curve import Keys, ask_for
from rose.serving.turns import Turns

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")

# Messages that may wait for one peer, and that are read ahead from one. A peer that lets so many
# lie has stopped reading.
QUEUE_LIMIT = 10_000
MAX_FRAME_BYTES = 256 << 20  # far above a full request body as ids, or the largest tokenizer.json
MESSAGES_IN_A_ROW = 64
# As plain numbers: the library's own take longer to be joined than a message to be sent.
_NOBLOCK, _NOBLOCK_SNDMORE, _POLLIN = (
    int(zmq.NOBLOCK),
    int(zmq.NOBLOCK | zmq.SNDMORE),
    int(zmq.POLLIN),
)
PROBE_TIMEOUT_S = 1.0


class AddressError(ValueError):
    """An address that a socket cannot or must not use."""


def check_address(address: str, *, keyed: bool = False) -> str:
    """Return `address` if an engine may listen there: ipc, loopback, or with keys anywhere.

    Raises:
        AddressError: another form, or a host beyond this machine without keys, where nothing would
            protect the connection.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise AddressError(f"address {address!r}: expected ipc://PATH or tcp://HOST:PORT")
    if scheme == "ipc":
        return _check_ipc(address, rest)
    host, _, port = rest.rpartition(":")
    if not host or not (port == "*" or (port.isdigit() and int(port) < 65536)):
        raise AddressError(f"address {address!r}: expected tcp://HOST:PORT")
    if host not in LOOPBACK_HOSTS and not keyed:
        raise AddressError(
            f"address {address!r}: {host} is not this machine, and the connection is not encrypted;"
            f" use one of {', '.join(LOOPBACK_HOSTS)}, or keys (`rose keys FOLDER`, --keys FOLDER)"
        )
    return address


def check_peer(address: str, *, keyed: bool = False) -> str:
    """Return `address` if a client may connect to it: `check_address`, and a place of its own.

    Raises:
        AddressError: as `check_address`; or it leaves the host, the port or the path open.
    """
    check_address(address, keyed=keyed)
    if address.startswith("tcp") and address.rpartition(":")[2] in ("*", "0"):
        raise AddressError(f"address {address!r}: it has to name the port of the engine")
    if address.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")):
        raise AddressError(f"address {address!r}: it has to name the host of the engine")
    if address == "ipc://*":
        raise AddressError(f"address {address!r}: it has to name the path of the engine")
    return address


def takes_keys(address: str) -> bool:
    """Whether keys are used at an address: over tcp, while ipc files are for this user alone."""
    return address.startswith("tcp")


def _check_ipc(address: str, path: str) -> str:
    limit = zmq.IPC_PATH_MAX_LEN
    if len(path.encode()) > limit:
        raise AddressError(f"address {address!r}: the path is longer than {limit} bytes")
    return address


def bind_router(
    context: "zmq.asyncio.Context",
    address: str,
    guard: "Callable[[zmq.asyncio.Socket], object] | None" = None,
) -> "zmq.asyncio.Socket":
    """Bind the engine's socket.

    It refuses to drop: a message for a peer that is gone, or that has stopped reading, raises. The
    file of an ipc address is for this user alone.

    Args:
        context: Of the process.
        address: Where to listen.
        guard: Makes the socket ask for keys before it is bound; without, only this machine may
            connect.

    Raises:
        AddressError: the address is taken or cannot be bound.
    """
    _check_free(check_address(address, keyed=guard is not None))
    socket = context.socket(zmq.ROUTER)
    _set_options(socket, address)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if guard is not None:
        guard(socket)
    try:
        with _private_files():
            socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise AddressError(f"cannot listen on {address}: {error.strerror}") from error
    return socket


def bound_address(socket: "zmq.asyncio.Socket") -> str:
    """Return where a socket listens, with the port or path that a `*` became."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def make_dealer(
    context: "zmq.asyncio.Context", address: str, keys: Keys | None = None
) -> "zmq.asyncio.Socket":
    """Make a client's socket, to be connected to `address`, with keys if it takes them.

    Once connected, ZeroMQ connects again by itself when a peer dies. What it had said is still
    read (`IMMEDIATE` would drop that). What is sent before the loss is noticed reaches the next
    engine at this address, which refuses it: it has not been greeted.
    """
    socket = context.socket(zmq.DEALER)
    _set_options(socket, address)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if keys is not None and takes_keys(address):
        ask_for(socket, keys)
    return socket


class Port:
    """A socket in the running event loop: sends at once, and delivers what arrives.

    `zmq.asyncio` does the same with futures and states for each message, which takes longer than
    the message is on its way. Its sockets are good for the rest; nothing is sent or received by one
    that has a port.
    """

    def __init__(self, socket: "zmq.asyncio.Socket") -> None:
        """Make the port of a socket, which stays the caller's to close."""
        self._owner = socket  # which would close it if nobody kept it
        self._socket: zmq.SyncSocket = zmq.Socket.shadow(socket.underlying)
        self._turns = Turns(self._take_messages)
        self._take: Callable[[list[zmq.Frame]], None] = lambda _: None

    def send(self, parts: Sequence[Any], frames: Sequence[Any] = ()) -> None:
        """Send a message without waiting; `frames` are not copied if they are large.

        Raises:
            zmq.Again: there is no connection, or the peer has stopped reading.
            zmq.ZMQError: the peer is gone.
        """
        *first, last = *parts, *frames
        try:
            for part in first:
                self._socket.send(part, _NOBLOCK_SNDMORE, copy=not frames)
            self._socket.send(last, _NOBLOCK, copy=not frames)
        finally:
            self.has_messages()

    def has_messages(self) -> bool:
        """Say whether messages have arrived that nobody has received yet.

        Whatever is done with a socket can take the signal for them off its file descriptor, so
        this has to be asked after it.
        """
        found = self._is_readable()
        if found:
            self._turns.ask()
        return found

    async def deliver(self, take: Callable[[list[zmq.Frame]], None]) -> None:
        """Call `take` with the frames of each message, until cancelled or until it raises.

        Others get their turn even if messages never run out.
        """
        loop, signal = asyncio.get_running_loop(), cast("int", self._socket.getsockopt(zmq.FD))
        self._take = take
        loop.add_reader(signal, self._turns.now)
        try:
            await self._turns.run()
        finally:
            loop.remove_reader(signal)

    def _take_messages(self) -> None:
        for _ in range(MESSAGES_IN_A_ROW):
            try:
                message = self._receive()
            except zmq.Again:
                return
            self._take(message)
            if not self._is_readable():  # quicker to ask than an exception to raise
                return
        self._turns.ask()

    def _is_readable(self) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return events & _POLLIN != 0

    def _receive(self) -> list[zmq.Frame]:
        frames = [self._socket.recv(_NOBLOCK, copy=False)]
        while frames[-1].more:
            frames.append(self._socket.recv(_NOBLOCK, copy=False))
        return frames


def _set_options(socket: "zmq.asyncio.Socket", address: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_LIMIT)
    socket.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, "[" in address)


def _check_free(address: str) -> None:
    """Refuse an ipc path where somebody listens, or that is no socket: ZeroMQ would replace it."""
    scheme, _, name = address.partition("://")
    if scheme != "ipc" or name.startswith(("@", "*")):
        return
    path = Path(name)
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise AddressError(f"cannot listen on {address}: the file is not a socket")
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(name)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise AddressError(f"cannot listen on {address}: {error.strerror or error}") from None
    raise AddressError(f"cannot listen on {address}: another process listens there")


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Create files for this user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
