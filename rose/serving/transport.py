"""ZeroMQ sockets with the options that ROSE relies on, and the addresses it allows."""

import zmq
import zmq.asyncio

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class AddressError(ValueError):
    """An address that a socket cannot or must not use."""


def check_address(address: str) -> str:
    """Return `address` if it is ipc or on the loopback interface.

    Raises:
        AddressError: another form, or a host beyond this machine, where nothing would protect the
            connection.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise AddressError(f"address {address!r}: expected ipc://PATH or tcp://HOST:PORT")
    if scheme == "ipc":
        return _check_ipc(address, rest)
    host, _, port = rest.rpartition(":")
    if not host or not (port == "*" or (port.isdigit() and int(port) < 65536)):
        raise AddressError(f"address {address!r}: expected tcp://HOST:PORT")
    if host not in LOOPBACK_HOSTS:
        raise AddressError(
            f"address {address!r}: {host} is not this machine, and the connection is not encrypted;"
            f" use one of {', '.join(LOOPBACK_HOSTS)}"
        )
    return address


def _check_ipc(address: str, path: str) -> str:
    limit = zmq.IPC_PATH_MAX_LEN
    if len(path.encode()) > limit:
        raise AddressError(f"address {address!r}: the path is longer than {limit} bytes")
    return address


def bind_router(context: "zmq.asyncio.Context", address: str) -> "zmq.asyncio.Socket":
    """Bind the engine's socket.

    It refuses to drop: a message for a peer that is gone raises, and queues are unlimited, since
    what can be in them is bounded by the work that the engine has admitted.

    Raises:
        AddressError: the address is taken or cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    _set_options(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        socket.bind(check_address(address))
    except zmq.ZMQError as error:
        socket.close()
        raise AddressError(f"cannot listen on {address}: {error.strerror}") from error
    return socket


def make_dealer(context: "zmq.asyncio.Context") -> "zmq.asyncio.Socket":
    """Make a client's socket; once connected, ZeroMQ connects again by itself when a peer dies.

    A message is only queued for a connection that stands, never for one that may come.
    """
    socket = context.socket(zmq.DEALER)
    _set_options(socket)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def _set_options(socket: "zmq.asyncio.Socket") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 1 << 30)
