"""A `rose serve` process tree for tools that attack one: start, watch its memory, read its log."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

START_LIMIT_S = 180
STOP_LIMIT_S = 60
MIB = 1 << 20

_TROUBLE = re.compile(
    r"^\d\d:\d\d:\d\d (WARNING|ERROR|CRITICAL)|^Traceback|(Error|Exception|Warning): "
)


@dataclass
class RunningServer:
    """Where a server is reached, and what is known of it.

    Attributes:
        url: Without a path.
        pid: Of the root of its process tree; None: it is not ours to look at.
        log: What it wrote; None: not known.
    """

    url: str
    pid: int | None = None
    log: Path | None = None

    def troubles(self) -> list[str]:
        """Lines of the log that should not be there: warnings, errors, tracebacks."""
        if self.log is None:
            return []
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if _TROUBLE.search(line)]


@contextlib.contextmanager
def serve(
    models: Sequence[str | Path], *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """Run `rose serve` on a free port of this machine until the block ends.

    Args:
        models: Their folders.
        options: Of the command line.
        environment: Variables to set beside those of this process.

    Raises:
        RuntimeError: it did not become ready, or did not stop with exit code 0 when asked to.
    """
    with tempfile.TemporaryDirectory(prefix="rose-tool-") as folder:
        log = Path(folder) / "log"
        port = free_port()
        command = [sys.executable, "-m", "rose", "serve", *map(str, models), "--port", str(port)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *options],
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )
        server = RunningServer(f"http://127.0.0.1:{port}", process.pid, log)
        try:
            _wait_ready(process, server)
            yield server
        finally:
            process.terminate()
            code = process.wait(STOP_LIMIT_S)
        if code != 0:
            raise RuntimeError(f"the server ended with exit code {code}\n{log.read_text()}")


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], server: RunningServer) -> None:
    assert server.log is not None
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start\n{server.log.read_text()}")


@dataclass
class MemoryWatch:
    """Samples the resident memory of each process of a tree, in a thread of its own.

    Attributes:
        samples: Of each process, by name: (seconds since the start, MiB).
    """

    pid: int | None
    interval_s: float = 0.5
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "MemoryWatch":
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        if self.pid is None:
            return
        tree = tree_of(self.pid)
        while not self._done.wait(self.interval_s):
            now = time.monotonic() - self._began
            for name, process in tree.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rss = process.memory_info().rss / MIB
                    self.samples.setdefault(name, []).append((now, rss))

    def growth(self) -> dict[str, tuple[float, float]]:
        """MiB of each process early (from 20 % of the run on) and at the end.

        Each is the median of a twentieth of the samples, so that no single one decides.
        """
        found = {}
        for name, samples in self.samples.items():
            values = [rss for _, rss in samples]
            few = max(1, len(values) // 20)
            early = sorted(values[len(values) // 5 :][:few])
            late = sorted(values[-few:])
            found[name] = (early[len(early) // 2], late[len(late) // 2])
        return found


def tree_of(pid: int) -> dict[str, psutil.Process]:
    """The processes of a tree by what they do; several that do the same are numbered from 0."""
    root = psutil.Process(pid)
    found: dict[str, list[psutil.Process]] = {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.setdefault(_role(process), []).append(process)
    return {
        f"{role} {number}" if len(same) > 1 else role: process
        for role, same in found.items()
        for number, process in enumerate(sorted(same, key=_address))
    }


def _address(process: psutil.Process) -> str:
    """Where an engine listens."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        if "--bind" in words:
            return words[words.index("--bind") + 1]
    return ""


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    for role in ("gateway", "engine"):
        if role in words:
            name = words[words.index("--name") + 1] if "--name" in words else ""
            return f"{role} {name}".strip()
    return "supervisor" if "serve" in words else f"process {process.pid}"


def open_files(pid: int | None) -> dict[str, int]:
    """How many files and sockets each process of a tree has open."""
    if pid is None:
        return {}
    return {role: process.num_fds() for role, process in tree_of(pid).items()}
