"""The real process tree, started once for all end-to-end tests."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port

MODELS = Path(__file__).parents[2] / ".models"


class Server:
    """A `rose serve` process and what it wrote."""

    def __init__(self, *arguments, log, threads=1):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log
        command = [
            sys.executable,
            "-m",
            "rose",
            "serve",
            *map(str, arguments),
            "--port",
            str(self.port),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    @property
    def log(self):
        return self.log_path.read_text()

    def wait_ready(self, timeout=120):
        """Wait until the supervisor says that it serves: what dies before that fails the start."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(httpx.TransportError):
                ready = httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
                if ready and "Documentation: " in self.log:
                    return self
            time.sleep(0.1)
        raise TimeoutError(self.log)

    def wait_busy(self, requests, timeout=60):
        """Wait until so many requests are being served, beside the one that asks."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            text = httpx.get(f"{self.url}/metrics", timeout=5).text
            (in_flight,) = re.findall(r"^rose_requests_in_flight (\S+)", text, re.MULTILINE)
            if float(in_flight) > requests:
                return self
            time.sleep(0.02)
        raise TimeoutError(text)

    def children(self):
        """Pids of the processes that the supervisor started."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def stop(self, number=signal.SIGTERM, timeout=60):
        self.process.send_signal(number)
        return self.process.wait(timeout)


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture(scope="session")
def minilm():
    path = MODELS / "all-MiniLM-L6-v2"
    if not path.exists():
        pytest.skip("needs the demo models: make models")
    return path


@pytest.fixture(scope="session")
def smollm():
    path = MODELS / "SmolLM2-135M-Instruct"
    if not path.exists():
        pytest.skip("needs the demo models: make models")
    return path


@pytest.fixture(scope="session")
def server(minilm, smollm, tmp_path_factory):
    """Both demo models behind one gateway."""
    server = Server(minilm, smollm, log=tmp_path_factory.mktemp("serve") / "log")
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.stop()
