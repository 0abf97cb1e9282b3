"""The parent's side of an engine's process: it works in its turn and is stopped in between."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tools.peers.environments import Home, last_line

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 300
ANSWER_LIMIT_S = 300


class PeerError(RuntimeError):
    """An engine did not start, did not answer, or failed; the message says how."""


def variables(home: Home, environment: str | None, threads: int) -> dict[str, str]:
    """Environment variables of a process that runs in an environment."""
    found = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "true",
        "DO_NOT_TRACK": "1",
    }
    if environment == "llama":
        found["PYTHONPATH"] += os.pathsep + str(home.llama_source)
        found["LLAMA_CPP_LIB_PATH"] = found["LD_LIBRARY_PATH"] = str(home.llama_bin)
    return found


class OthersWatch:
    """Watches how much of the machine's cores others use than processes and their children."""

    def __init__(self, *pids: int) -> None:
        """Watch while the block lasts."""
        self._pids = pids
        self.share = 0.0

    def __enter__(self) -> "OthersWatch":
        self._before = self._times()
        return self

    def __exit__(self, *_: object) -> None:
        wall, busy, own = (
            after - before for after, before in zip(self._times(), self._before, strict=True)
        )
        self.share = max(0.0, busy - own) / (wall * (os.cpu_count() or 1) + 1e-9)

    def _times(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of all cores at work, of the processes."""
        cores = psutil.cpu_times()
        busy = sum(cores) - cores.idle - cores.iowait - cores.guest - cores.guest_nice
        return time.monotonic(), busy, sum(map(cpu_seconds, self._pids))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children."""
    found = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += sum(process.cpu_times()[:2])
    return found


class Worker:
    """A `tools.peers.worker` process.

    Attributes:
        versions: Of the engine's packages; known once `wait_ready` is through.
    """

    def __init__(
        self, home: Home, kind: str, name: str, environment: str | None, threads: int
    ) -> None:
        """Start the process; `wait_ready` waits for it."""
        self.name = name
        self.versions: dict[str, str] = {}
        self._log = home.log(f"{kind}-{name}".replace(" ", "-").replace(",", ""))
        paths = [str(home.models), str(home.llama_bin), str(home.path / "inputs.json")]
        command = [str(home.python(environment)), "-m", "tools.peers.worker", kind, name]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *paths, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=home.path,
                env=variables(home, environment, threads),
                start_new_session=True,
            )
        self._received = b""

    def wait_ready(self) -> None:
        """Wait until the engine is loaded, then let it sleep.

        Raises:
            PeerError: it did not start.
        """
        self.versions = self._answer(START_LIMIT_S)["versions"]
        self._signal(signal.SIGSTOP)

    def ask(self, **order: Any) -> dict[str, Any]:  # noqa: ANN401
        """Wake the process, give an order, and let it sleep again.

        Returns:
            its answer, and as "others" the share of the machine's cores that other processes had.

        Raises:
            PeerError: it failed or took too long.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            with OthersWatch(self._process.pid) as watch:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
                answer = self._answer(ANSWER_LIMIT_S)
            return answer | {"others": watch.share}
        except OSError as error:
            raise PeerError(self._end_of_log()) from error
        finally:
            self._signal(signal.SIGSTOP)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        output = self._process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(deadline - time.monotonic()):
                    raise PeerError(f"no answer within {limit_s} s")
                piece = os.read(output.fileno(), 1 << 20)
                if not piece:
                    raise PeerError(self._end_of_log())
                self._received += piece
        line, self._received = self._received.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _end_of_log(self) -> str:
        return f"the process ended: {last_line(self._log.read_text(errors='replace'))}"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the process and what it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def closing_all(workers: dict[str, Worker]) -> Iterator[dict[str, Worker]]:
    """Close the workers that are there at the end."""
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()
