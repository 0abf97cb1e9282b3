"""Running workloads: start the engines, compare what they answer, let them take turns."""

import contextlib
import hashlib
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.peers import conversions
from tools.peers.embedders import EMBEDDERS
from tools.peers.environments import Home, InstallError
from tools.peers.generators import GENERATORS, QUANTIZED
from tools.peers.processes import PeerError, Worker, closing_all, variables
from tools.peers.servers import SERVERS, RunningServer
from tools.peers.turns import Measured, Sample, take_turns
from tools.peers.workloads import Inputs, Row, Workload
from tools.texts import cosines, near_one

ENGINES: dict[str, dict[str, Any]] = {
    "embed": EMBEDDERS,
    "generate": GENERATORS,
    "quantized": QUANTIZED,
    "http": SERVERS,
    "start": SERVERS,
}
PEERS = tuple(
    dict.fromkeys(
        name for engines in ENGINES.values() for name in engines if not name.startswith("ROSE")
    )
)
LEAST_COSINE = 0.999
CHECKS: dict[str, dict[str, Any]] = {
    "embed": {"op": "vectors"},
    "generate": {"op": "tokens", "count": 4, "new": 16},
    "quantized": {"op": "tokens", "count": 16, "new": 16},
}
HTTP_SECONDS = 2.0


@dataclass
class Outcome:
    """All that is known of a workload after it ran.

    Attributes:
        engines: By engine: its versions and how it is used.
        checks: By engine: how its answers compare with the reference.
    """

    workload: str
    when: str
    threads: int
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    measured: Measured = field(default_factory=Measured)

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        """Read what `write` wrote."""
        content = json.loads(path.read_text())
        return cls(**{**content, "measured": Measured(**content["measured"])})

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Bench:
    """What every workload needs.

    Attributes:
        home: Of environments and models.
        checkpoints: The folders "embedder" and "llm".
        names: The engines that are wanted.
        limit_s: Seconds for the turns of a workload, beyond three of each row.
    """

    home: Home
    checkpoints: dict[str, Path]
    inputs: Inputs
    names: Sequence[str]
    threads: int
    turns: int
    limit_s: float
    say: Callable[[str], None]

    def prepare(self, kind: str) -> tuple[list[str], dict[str, str]]:
        """Install and convert what engines of a kind need.

        Returns:
            the engines that can be had, and the others with the reason.
        """
        link = self.home.models / "llm"
        self.home.models.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(self.checkpoints["llm"].resolve())
        ready, failed = [], {}
        for name, engine in ENGINES[kind].items():
            if name not in self.names:
                if name in PEERS:
                    failed[name] = "not asked for in this run"
                continue
            self.say(f"prepare {name}")
            try:
                if engine.environment:
                    self.home.install(engine.environment)
                for model in engine.models:
                    if model not in self.checkpoints:
                        conversions.make(self.home, model, self.checkpoints)
                ready.append(name)
            except InstallError as error:
                failed[name] = f"does not install: {error}"
        return ready, failed

    def run(self, workload: Workload, outcome: Outcome) -> None:
        """Run a workload; what is known so far is in `outcome`, also if this is interrupted."""
        ready, outcome.measured.failed = self.prepare(workload.kind)
        outcome.engines = {
            name: {"settings": ENGINES[workload.kind][name].settings} for name in ready
        }
        if workload.kind in CHECKS:
            self._run_workers(workload, ready, outcome)
        elif workload.kind == "http":
            self._measure_http(workload, ready, outcome)
        else:
            self._measure_start(workload, ready, outcome)

    def _run_workers(self, workload: Workload, names: Sequence[str], outcome: Outcome) -> None:
        reference = self.reference(workload.kind)
        limits = Worker(self.home, "limits", "limits", None, self.threads)
        with contextlib.closing(limits), closing_all({}) as workers:
            self._start_workers(workload.kind, names, workers, outcome)
            limits.wait_ready()
            for name in list(workers):
                check_worker(workload.kind, name, workers, reference, outcome)
            self._measure_workers(workload, workers, limits, outcome)

    def _start_workers(
        self, kind: str, names: Sequence[str], workers: dict[str, Worker], outcome: Outcome
    ) -> None:
        """Start all at once, so that they load beside each other; those that fail are closed."""
        for name in names:
            environment = ENGINES[kind][name].environment
            workers[name] = Worker(self.home, kind, name, environment, self.threads)
        for name, worker in list(workers.items()):
            self.say(f"start {name}")
            try:
                worker.wait_ready()
                outcome.engines[name]["versions"] = worker.versions
            except PeerError as error:
                outcome.measured.failed[name] = f"does not start: {error}"
                workers.pop(name).close()

    def _measure_workers(
        self, workload: Workload, workers: dict[str, Worker], limits: Worker, outcome: Outcome
    ) -> None:
        weights = [max(row.tokens, row.units) for row in workload.rows]
        for row, weight in zip(workload.rows, weights, strict=True):
            self.say(f"{outcome.workload}: {row.name}")
            share = self.limit_s * weight / sum(weights)
            if row.order["op"] == "mixed":
                choose_batches(workers, outcome)
            asks = {name: asking(worker, row.order) for name, worker in workers.items()}
            machine = asking(limits, {"op": "limits"})
            take_turns(row.name, asks, outcome.measured, self.turns, share, machine)
            for name in set(workers) - set(asks):
                workers.pop(name).close()

    def _measure_http(self, workload: Workload, names: Sequence[str], outcome: Outcome) -> None:
        with contextlib.ExitStack() as stack:
            servers = self._start_servers(names, outcome, stack)
            for row in workload.rows:
                self.say(f"{outcome.workload}: {row.name}")
                texts = [text.text for text in self.inputs.texts[str(row.order["length"])]]
                loads = {name: loading(server, texts, row) for name, server in servers.items()}
                share = self.limit_s / len(workload.rows)
                take_turns(row.name, loads, outcome.measured, self.turns, share)
                for name in set(servers) - set(loads):
                    del servers[name]  # the stack closes it

    def _start_servers(
        self, names: Sequence[str], outcome: Outcome, stack: contextlib.ExitStack
    ) -> dict[str, RunningServer]:
        servers = {}
        reference = self.reference("embed")
        for name in names:
            self.say(f"start {name}")
            outcome.engines[name]["versions"] = self._versions(name)
            try:
                server = RunningServer(self.home, name, self.threads)
                stack.callback(server.close)
                vectors = server.vectors([text.text for text in self.inputs.checked])
                server.sleep()
            except PeerError as error:
                outcome.measured.failed[name] = f"does not start: {error}"
                continue
            if compare(name, {"vectors": vectors}, reference, outcome):
                servers[name] = server
            else:
                server.close()
        return servers

    def _measure_start(self, workload: Workload, names: Sequence[str], outcome: Outcome) -> None:
        (row,) = workload.rows
        for name in names:
            outcome.engines[name]["versions"] = self._versions(name)

        def starting(name: str) -> Callable[[], Sample]:
            def start() -> Sample:
                self.say(f"start {name}")
                server = RunningServer(self.home, name, self.threads)
                with contextlib.closing(server):
                    return {"seconds": [server.first_vector_s], "mib": server.resident_mib()}

            return start

        starts = {name: starting(name) for name in names}
        take_turns(row.name, starts, outcome.measured, self.turns, self.limit_s)

    def reference(self, kind: str) -> dict[str, Any]:
        """What transformers answers to the order that checks engines; kept in a file.

        Raises:
            PeerError: it did not answer.
        """
        inputs = (self.home.path / "inputs.json").read_bytes()
        path = self.home.path / f"reference-{kind}-{hashlib.sha256(inputs).hexdigest()[:12]}.json"
        if not path.exists():
            self.say("reference")
            exact = "generate" if kind == "quantized" else kind
            worker = Worker(self.home, exact, "transformers", None, self.threads)
            with contextlib.closing(worker):
                worker.wait_ready()
                path.write_text(json.dumps(worker.ask(**CHECKS[kind])))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def _versions(self, name: str) -> dict[str, str]:
        server = SERVERS[name]
        code = "import sys, json; from tools.peers.worker import versions; "
        code += "print(json.dumps(versions(sys.argv[1:])))"
        done = subprocess.run(
            [str(self.home.python(server.environment)), "-c", code, *server.packages],
            env=variables(self.home, server.environment, self.threads),
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found


def asking(worker: Worker, order: dict[str, Any]) -> Callable[[], Sample]:
    """A function that gives a worker an order."""
    return lambda: worker.ask(**order)


def choose_batches(workers: dict[str, Worker], outcome: Outcome) -> None:
    """Let workers find their batch size for mixed texts; close those that fail."""
    for name, worker in list(workers.items()):
        try:
            outcome.engines[name] |= worker.ask(op="choose_batch")
        except PeerError as error:
            outcome.measured.failed[name] = f"mixed: {error}"
            workers.pop(name).close()


def loading(server: RunningServer, texts: Sequence[str], row: Row) -> Callable[[], Sample]:
    """A function that puts a server under the load of a row."""

    def load() -> Sample:
        server.wake()
        try:
            return server.load(texts, row.order["clients"], HTTP_SECONDS)
        finally:
            server.sleep()

    return load


def check_worker(
    kind: str,
    name: str,
    workers: dict[str, Worker],
    reference: dict[str, Any],
    outcome: Outcome,
) -> None:
    """Compare a worker's answer with the reference; close the worker if it is another one."""
    try:
        answer = workers[name].ask(**CHECKS[kind])
        good = compare(name, answer, reference, outcome, exact=kind != "quantized")
    except PeerError as error:
        outcome.measured.failed[name] = f"cannot be checked: {error}"
        good = False
    if not good:
        workers.pop(name).close()


def compare(
    name: str,
    answer: dict[str, Any],
    reference: dict[str, Any],
    outcome: Outcome,
    *,
    exact: bool = True,
) -> bool:
    """Note how an answer compares with the reference; False if it is another one.

    Vectors have to be near the reference; greedy outputs have to be equal. Where they need not be
    `exact`, as with rounded weights, most have to begin with the same token.
    """
    if "vectors" in reference:
        found = cosines(np.array(answer["vectors"]), np.array(reference["vectors"]))
        good = bool(found.min() >= LEAST_COSINE)  # not of NaN
        note = f"cosine {near_one(float(found.min()))}"
    elif not exact:
        good, note = _compare_beginnings(answer["tokens"], reference["tokens"])
    else:
        pairs = list(zip(answer["tokens"], reference["tokens"], strict=True))
        equal = sum(list(one) == list(other) for one, other in pairs)
        good = equal == len(pairs)
        note = f"{equal} of {len(pairs)} outputs equal"
    outcome.checks[name] = note
    if not good:
        outcome.measured.failed[name] = f"other answers than transformers: {note}"
    return good


def _compare_beginnings(
    outputs: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
) -> tuple[bool, str]:
    """Return whether most outputs begin like the reference, and how long they are equal."""
    equal = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(other))
        for one, other in zip(outputs, wanted, strict=True)
    ]
    first = sum(count > 0 for count in equal)
    note = f"first token equal in {first} of {len(equal)} outputs, "
    note += f"{np.mean(equal):.1f} of {len(wanted[0])} tokens in the mean"
    return 2 * first > len(equal), note
