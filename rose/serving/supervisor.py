"""`rose serve`: starts the engines and the gateway as one process tree, and ends them together."""

import contextlib
import http.client
import json
import logging
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType

from rose.serving.children import Child
from rose.serving.process import listen

log = logging.getLogger(__name__)

POLL_S = 0.05
DRAIN_LIMIT_S = 30.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequestedError(Exception):
    """SIGTERM or SIGINT has arrived."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve: the name that clients use, and where it lies."""

    name: str
    path: str


def parse_models(arguments: Sequence[str]) -> list[ModelSpec]:
    """Read `PATH` and `NAME=PATH` arguments; without a name it is the folder's.

    Raises:
        ValueError: two models have the same name.
    """
    specs = [_parse_model(argument) for argument in arguments]
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two models are called {twice[0]!r}; name them apart with NAME=PATH")
    return specs


def _parse_model(argument: str) -> ModelSpec:
    name, separator, path = argument.partition("=")
    if separator and name and path:
        return ModelSpec(name, path)
    return ModelSpec(Path(argument).resolve().name or argument, argument)


class Supervisor:
    """A process tree of engines and one gateway, kept running."""

    def __init__(
        self,
        models: Sequence[ModelSpec],
        *,
        host: str,
        port: int,
        replicas: int = 1,
        engine_options: Sequence[str] = (),
        gateway_options: Sequence[str] = (),
        secrets: Mapping[str, str],
    ) -> None:
        """Prepare the tree; the options are passed on to `rose engine` and `rose gateway`.

        `secrets` reach the gateway by its environment, where other users cannot read them.
        """
        self._models = models
        self._replicas = replicas
        self._host, self._port = host, port
        self._engine_options, self._gateway_options = engine_options, gateway_options
        self._secrets = {name: value for name, value in secrets.items() if value}
        self._children: list[Child] = []

    def run(self) -> int:
        """Run until a signal asks to stop; returns 0 then.

        Raises:
            OSError: the port is taken; nothing has been started then.
            ChildFailedError: a process could not start, or was lost for good; the others have
                been stopped.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, _request_stop)
        with listen(self._host, self._port) as listener, _socket_folder() as folder:
            try:
                self._start(folder, listener)
                self._wait_ready()
                self._announce()
                while True:
                    for child in self._children:
                        child.keep_running()
                    time.sleep(POLL_S)
            except StopRequestedError:
                log.info("stopping")
                return 0
            finally:
                self._stop()

    def _start(self, folder: Path, listener: socket.socket) -> None:
        addresses = []
        for index, (model, replica) in enumerate(product(self._models, range(self._replicas))):
            address = f"ipc://{folder}/{index}.sock"
            addresses += ["--engine", f"{model.name}={address}"]
            command = ["engine", model.path, "--name", model.name, "--bind", address]
            name = f"engine {model.name}" + (f" {replica}" if self._replicas > 1 else "")
            self._children.append(Child(name, [*command, *self._engine_options], secrets={}))
        fd = listener.fileno()
        command = ["gateway", "--listen-fd", str(fd), *addresses, *self._gateway_options]
        self._children.append(Child("gateway", command, secrets=self._secrets, inherit=[fd]))
        for child in self._children:
            child.start()

    def _wait_ready(self) -> None:
        while not self._ready():
            for child in self._children:
                child.check_started()
            time.sleep(POLL_S)

    def _ready(self) -> bool:
        connection = http.client.HTTPConnection(self._reachable_host, self._port, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    @property
    def _reachable_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)

    def _announce(self) -> None:
        host = f"[{self._reachable_host}]" if ":" in self._reachable_host else self._reachable_host
        url = f"http://{host}:{self._port}"
        body = json.dumps({"model": self._models[0].name, "input": "a red kite over the hill"})
        print(  # noqa: T201 - the line that a person waits for
            f"\nROSE serves {', '.join(model.name for model in self._models)} on {url}\n"
            f"Documentation: {url}/docs\nTry:\n"
            f"  curl {url}/v1/embeddings -H 'Content-Type: application/json' -d '{body}'\n",
            flush=True,
        )

    def _stop(self) -> None:
        """Stop the gateway first, so that it can answer what the engines still work on.

        A second signal ends everything at once.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._kill_all)
        deadline = time.monotonic() + DRAIN_LIMIT_S
        for child in reversed(self._children):
            child.terminate()
            if not child.wait(max(0.1, deadline - time.monotonic())):
                log.warning("%s did not end in time and is killed", child.name)
                child.kill()
            child.close()

    def _kill_all(self, _number: int, _frame: FrameType | None) -> None:
        for child in self._children:
            child.kill()


def _request_stop(number: int, _frame: FrameType | None) -> None:
    raise StopRequestedError(signal.Signals(number).name)


@contextlib.contextmanager
def _socket_folder() -> Iterator[Path]:
    """Make a private folder for the tree's sockets, and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="rose-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
