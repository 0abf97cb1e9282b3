"""`rose serve`: starts the engines and the gateway as one process tree, and ends them together."""

import contextlib
import http.client
import json
import logging
import shlex
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from rose.serving.children import Child, ChildFailedError
from rose.serving.process import KEYS_VARIABLE, listen_together, stop_signals, unverified
from rose.serving.socket_folder import SocketFolder

log = logging.getLogger(__name__)

POLL_S = 0.05
PROBE_TIMEOUT_S = 0.5
GATEWAY_STOP_S = 70.0  # it drains for 60
ENGINE_STOP_S = 10.0  # without a gateway they have nothing left to do
SOCKETS_CHECK_S = 1.0


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
    if separator and name and path and not Path(argument).exists():
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
        gateway_workers: int = 1,
        tls: bool = False,
        engine_options: Sequence[str] = (),
        gateway_options: Sequence[str] = (),
        secrets: Mapping[str, str],
    ) -> None:
        """Prepare the tree; the options are passed on to `rose engine` and `rose gateway`.

        `tls` says that the gateway's options make it speak TLS.
        `secrets` reach the gateway by its environment, where other users cannot read them.
        """
        self._models = models
        self._replicas = replicas
        self._gateway_workers = gateway_workers
        self._tls = tls
        self._host, self._port = host, port
        self._engine_options, self._gateway_options = engine_options, gateway_options
        self._secrets = {name: value for name, value in secrets.items() if value}
        self._engines: list[Child] = []
        self._gateways: list[Child] = []
        self._sockets: dict[Path, Child] = {}  # and who listens there
        self._signals = 0
        self._faults: list[str] = []  # of the way in which the tree ended

    def run(self) -> int:
        """Run until a signal asks to stop; return 0, or 1 if a process had to be killed then.

        Raises:
            OSError: the port is taken; nothing has been started then.
            ChildFailedError: a process could not start, or was lost for good; the others have
                been stopped.
        """
        for number in stop_signals():
            signal.signal(number, self._count_signal)
        with contextlib.ExitStack() as stack:
            listeners = [
                stack.enter_context(listener)
                for listener in listen_together(self._host, self._port, self._gateway_workers)
            ]
            folder = stack.enter_context(SocketFolder())
            try:
                self._start(folder.path, listeners)
                if self._wait_ready():
                    self._announce()
                    self._keep_running(folder)
                log.info("stopping")
            finally:
                for listener in listeners:
                    listener.close()  # or connections would wait here for a gateway that has gone
                self._stop()
        if self._faults:
            log.error("not stopped cleanly: %s", "; ".join(self._faults))
        return 1 if self._faults else 0

    @property
    def _children(self) -> list[Child]:
        return [*self._engines, *self._gateways]

    def _count_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Note a signal; the loops look. Raising here could hit the start of a process halfway."""
        self._signals += 1

    def _start(self, folder: Path, listeners: Sequence[socket.socket]) -> None:
        addresses = []
        for index, (model, replica) in enumerate(product(self._models, range(self._replicas))):
            path = folder / f"{index}.sock"
            address = f"ipc://{path}"
            addresses += ["--engine", f"{model.name}={address}"]
            command = ["engine", model.path, "--name", model.name, "--bind", address]
            name = f"engine {model.name}" + (f" {replica}" if self._replicas > 1 else "")
            self._sockets[path] = Child(name, [*command, *self._engine_options], secrets={})
            self._engines.append(self._sockets[path])
        for number, listener in enumerate(listeners):
            fd = listener.fileno()
            words = ["gateway", "--listen-fd", str(fd), *addresses, *self._gateway_options]
            name = "gateway"
            if self._gateway_workers > 1:
                name = f"gateway {number}"
                words += ["--worker", f"{number}/{self._gateway_workers}/{folder}"]
            child = Child(name, words, secrets=self._secrets, inherit=[fd])
            self._gateways.append(child)
            if self._gateway_workers > 1:
                self._sockets[folder / f"gateway-{number}.sock"] = child
        for child in self._children:
            child.start()

    def _wait_ready(self) -> bool:
        """Wait until all models are ready; False if a signal came first."""
        while not self._signals:
            for child in self._children:
                child.check_started()
            if all(child.up for child in self._gateways) and self._get("/ready") is not None:
                return True
            time.sleep(POLL_S)
        return False

    def _keep_running(self, folder: SocketFolder) -> None:
        checked = time.monotonic()
        while not self._signals:
            for child in self._children:
                child.keep_running()
            if time.monotonic() - checked > SOCKETS_CHECK_S:
                checked = time.monotonic()
                self._check_sockets(folder)
            time.sleep(POLL_S)

    def _check_sockets(self, folder: SocketFolder) -> None:
        """See that every engine and gateway can be reached by gateways that are started again.

        An engine whose socket somebody removed goes on serving the gateway that it is connected
        to, so processes are started again one by one.
        """
        try:
            if folder.restore():
                log.error("%s was removed by somebody and is made again", folder.path)
        except OSError as error:
            message = f"the folder of the sockets was removed and cannot be made again: {error}"
            raise ChildFailedError(message) from error
        lost = [child for path, child in self._sockets.items() if child.up and not path.exists()]
        if lost and all(child.up for child in self._children):
            lost[0].restart("its socket was removed")

    def _get(self, path: str) -> bytes | None:
        """Ask the gateway; None unless it answers 200."""
        where = (self._reachable_host, self._port)
        connection = (
            http.client.HTTPSConnection(*where, timeout=PROBE_TIMEOUT_S, context=unverified())
            if self._tls
            else http.client.HTTPConnection(*where, timeout=PROBE_TIMEOUT_S)
        )
        keys = self._secrets.get(KEYS_VARIABLE, "").split()
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    @property
    def _reachable_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)

    def _announce(self) -> None:
        host = f"[{self._reachable_host}]" if ":" in self._reachable_host else self._reachable_host
        url = f"http{'s' if self._tls else ''}://{host}:{self._port}"
        examples = "".join(f"  {command}\n" for command in self._examples(url))
        print(  # noqa: T201 - the lines that a person waits for
            f"\nROSE serves {', '.join(model.name for model in self._models)} on {url}\n"
            f"Documentation: {url}/docs\n" + (f"Try:\n{examples}" if examples else ""),
            flush=True,
        )

    def _examples(self, url: str) -> Iterator[str]:
        """Yield a command to try for each task that is served, on the first model that does it.

        Some embedders have no dense vectors, which the command asks for.
        """
        listed = msgspec.json.decode(self._get("/v1/models") or b'{"data": []}')["data"]
        tasks = {
            model["id"]: [
                task
                for task in model["tasks"]
                if task != "embed" or "dense" in model.get("output_types", ["dense"])
            ]
            for model in listed
        }
        for task, (path, fields) in EXAMPLES.items():
            able = [model.name for model in self._models if task in tasks.get(model.name, ())]
            if able:
                body = {"model": able[0], **fields}
                yield _curl(url + path, body, keyed=bool(self._secrets))

    def _stop(self) -> None:
        """Stop the gateways first, so that they can answer what the engines still work on.

        A second signal ends everything at once.
        """
        self._end(self._gateways, GATEWAY_STOP_S)
        self._end(self._engines, ENGINE_STOP_S)

    def _end(self, children: Sequence[Child], limit_s: float) -> None:
        asked = [child for child in children if not child.wait(0)]
        for child in asked:
            child.terminate()
        deadline = time.monotonic() + limit_s
        while running := [child for child in children if not child.wait(0)]:
            if self._signals > 1 or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        for child in running:
            log.warning("%s did not end in time and is killed", child.name)
            child.kill()
            self._faults.append(f"{child.name} did not end in time and was killed")
        for child in asked:
            if child not in running and (end := child.bad_end()) is not None:
                self._faults.append(f"{child.name} {end}")
        for child in children:
            child.close()


EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    ),
    "embed": ("/v1/embeddings", {"input": "a red kite over the hill"}),
    "score": ("/v1/rerank", {"query": "a bird of prey", "documents": ["a red kite", "a cup"]}),
    "classify": ("/v1/classify", {"input": "a red kite over the hill"}),
}


def _curl(url: str, body: dict[str, Any], *, keyed: bool) -> str:
    """Write a request as a command for the shell; a key is left for the person to fill in."""
    key = f' -H "Authorization: Bearer ${KEYS_VARIABLE}"' if keyed else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url} -H 'Content-Type: application/json'{key} -d {data}"
