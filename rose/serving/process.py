"""What every process of the tree does at its start: logging, signals, not outliving its parent."""

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from datetime import UTC, datetime
from ipaddress import ip_address
from types import FrameType
from typing import Literal

PARENT_VARIABLE = "ROSE_PARENT_PID"
HEARTBEAT_VARIABLE = "ROSE_HEARTBEAT_FD"
RESTARTS_VARIABLE = "ROSE_RESTARTS"  # how often the supervisor has started this process again
KEYS_VARIABLE = "ROSE_API_KEY"
HEARTBEAT_S = 1.0
PR_SET_PDEATHSIG = 1
BACKLOG = 2048

log = logging.getLogger(__name__)


class SupervisorGoneError(OSError):
    """The process that started this one, and that it may not outlive, has ended."""


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON."""

    def __init__(self, process: str) -> None:
        """Name the process in every line."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in entry.items() if value is not None})


def set_up_logging(level: str, process: str, style: Literal["text", "json"] = "text") -> None:
    """Log to stderr, one line per record, each naming the process it comes from."""
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {process}: %(message)s", "%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if style == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def die_with_parent() -> None:
    """Ask the kernel to end this process when the supervisor that started it is gone."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the request to the kernel
        raise SystemExit("the supervisor is gone")


def freeze_heap() -> None:
    """Keep the garbage collector from looking again at what is loaded now, and is there to stay.

    A full collection takes a tenth of a second in a process with torch, in which nothing else runs.
    """
    gc.collect()
    gc.freeze()


def was_restarted() -> bool:
    """Whether a supervisor has started this process in place of one that ended."""
    return int(os.environ.get(RESTARTS_VARIABLE, "0")) > 0


async def beat() -> None:
    """Tell the supervisor, if there is one, that this event loop turns, until cancelled.

    Raises:
        SupervisorGoneError: it has ended; where the kernel tells no child of that, this does.
    """
    pipe = os.environ.get(HEARTBEAT_VARIABLE)
    while True:
        if pipe is not None:
            with contextlib.suppress(BlockingIOError):  # it is slow
                _beat_once(int(pipe))
        await asyncio.sleep(HEARTBEAT_S)


def _beat_once(pipe: int) -> None:
    try:
        os.write(pipe, b".")
    except BrokenPipeError:
        raise SupervisorGoneError("the supervisor is gone") from None


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask to stop; a lost terminal is one, unless `nohup` says no."""
    hung_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hung_up]


def leave_on_stop_signals() -> None:
    """Let stop signals end this process at once, with exit code 0, until a loop takes them over.

    An exception would not do: code that is imported meanwhile may swallow it.
    """

    def leave(_number: int, _frame: FrameType | None) -> None:
        try:
            log.info("stopped before it was ready")
        finally:
            os._exit(0)

    for number in stop_signals():
        signal.signal(number, leave)


def stop_event() -> asyncio.Event:
    """Return an event that the stop signals set, for the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    return stop


def raise_file_limit() -> None:
    """Let this process open as many files as it may: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems name no number
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_open_to_others(listener: socket.socket) -> bool:
    """Say whether a TCP socket can be reached from beyond this machine."""
    return not ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """Bind several TCP sockets to one port; the system spreads connections over them.

    One socket in several processes would not do: the first to wake takes all that wait.

    Raises:
        OSError: as `listen`; also when others would share the port with these.
    """
    if count == 1:
        return [listen(host, port)]
    with listen(host, port) as alone:
        port = alone.getsockname()[1]
    return [listen(host, port, shared=True) for _ in range(count)]


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind a TCP socket for HTTP; connections queue from now on.

    Args:
        host: Interface.
        port: 0 for any.
        shared: Whether others of this user may bind the same port.

    Raises:
        OSError: the port is taken or the interface does not exist.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.listen(BACKLOG)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def unverified() -> ssl.SSLContext:
    """TLS to a process of this tree: whose certificate it is does not matter there."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
