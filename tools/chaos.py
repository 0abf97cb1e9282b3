#!/usr/bin/env python3
"""Kill and freeze engines of a server under load, and look for what that loses.

Embeddings (small and large), completions and streams, some cancelled and some malformed, meet a
server of several replicas, of which one is killed with SIGKILL or frozen with SIGSTOP every few
seconds. Every request has to end once: with the right answer or with an error object. Afterwards
every counter is back at its baseline, and no process and no socket file is left.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tools.generation import Wish, draw_wish, read_answer, read_stream
from tools.load_test import Known, draw_request
from tools.mistakes import error_fault
from tools.report import MODELS, Report, add_output_options
from tools.server import RunningServer, open_files, serve, tree_of
from tools.soak import Target, busy_gauges, idle_metrics, learn_target, metrics_of

ANSWER_LIMIT_S = 120.0  # a request that takes longer is stuck
RECOVERY_LIMIT_S = 60.0
LARGE = 200  # texts
CANCEL_WITHIN_S = 1.0
ALLOWED = (429, 503)  # of a good request that fails
KINDS = ("small", "small", "small", "large", "text", "stream", "stream")
PATHS = ("/v1/embeddings", "/v1/completions", "/v1/chat/completions")


@dataclass
class Blow:
    """Something done to an engine.

    Attributes:
        role: Of the process.
        what: Name of the signal.
        recovered_s: From the signal until all replicas were ready again; None: not in time.
    """

    role: str
    what: str
    recovered_s: float | None = None


@dataclass
class Found:
    """What the clients saw.

    Attributes:
        ends: How many requests of each kind ended how.
        seconds: Of each request that was answered well, by kind.
        faults: What was wrong, one line each.
        blows: In their order.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    blows: list[Blow] = field(default_factory=list)

    def count(self, *ends: str) -> int:
        """Requests that ended in one of these ways; without a way, all."""
        return sum(n for (_, end), n in self.ends.items() if not ends or end in ends)


class Clients:
    """Clients that each wait for an answer before they send again."""

    def __init__(self, http: httpx.AsyncClient, target: Target, seed: int) -> None:
        """Prepare to send what `seed` draws."""
        self.found = Found()
        self.sent = 0
        self._http = http
        self._target = target
        self._seed = seed

    async def run(self, clients: int, until: float) -> None:
        """Send from `clients` at once until a moment of the monotonic clock."""

        async def client() -> None:
            while time.monotonic() < until:
                self.sent += 1
                await self._send(self.sent)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _send(self, number: int) -> None:
        rng = np.random.default_rng([self._seed, number])
        kind = "malformed" if rng.random() < 0.1 else str(rng.choice(KINDS))
        cancel_after = CANCEL_WITHIN_S * rng.random() ** 2 if rng.random() < 0.2 else None
        began = time.monotonic()
        try:
            async with asyncio.timeout(cancel_after or ANSWER_LIMIT_S):
                end, fault = await getattr(self, f"_{kind}")(rng, f"chaos-{number}")
        except TimeoutError:
            end = "cancelled" if cancel_after else "stuck"
            fault = None if cancel_after else f"no answer within {ANSWER_LIMIT_S:g} s"
        except httpx.HTTPError as error:
            end, fault = "lost", f"no answer: {error!r}"
        self.found.ends[kind, end] += 1
        if end == "answered":
            self.found.seconds.setdefault(kind, []).append(time.monotonic() - began)
        if fault:
            self.found.faults.append(f"request {number}, {kind}: {fault}")

    async def _malformed(self, rng: np.random.Generator, name: str) -> tuple[str, str | None]:
        mistake = self._target.mistakes[int(rng.integers(len(self._target.mistakes)))]
        answer = await self._http.request(
            mistake.method,
            mistake.path,
            content=mistake.body or None,
            headers={**mistake.headers, "x-request-id": name},
        )
        if answer.status_code in ALLOWED:  # it was refused before anybody looked at it
            return "refused", error_fault(answer.content)
        return "answered", mistake.fault_of(answer.status_code, answer.content)

    async def _small(self, rng: np.random.Generator, name: str) -> tuple[str, str | None]:
        return await self._embed(*draw_request(self._target.vectors, rng), name)

    async def _large(self, rng: np.random.Generator, name: str) -> tuple[str, str | None]:
        known = self._target.vectors
        indices = rng.integers(0, len(known.texts), LARGE).tolist()
        texts = [known.texts[i] for i in indices]
        body = {"model": known.model, "input": texts, "encoding_format": "base64"}
        return await self._embed(indices, body, name)

    async def _embed(
        self, indices: list[int], body: dict[str, Any], name: str
    ) -> tuple[str, str | None]:
        answer = await self._http.post("/v1/embeddings", json=body, headers={"x-request-id": name})
        return judge_vectors(self._target.vectors, indices, body, answer, name)

    async def _text(self, rng: np.random.Generator, name: str) -> tuple[str, str | None]:
        return await self._generate(draw_wish(self._target.texts, rng, stream=False), name)

    async def _stream(self, rng: np.random.Generator, name: str) -> tuple[str, str | None]:
        return await self._generate(draw_wish(self._target.texts, rng, stream=True), name)

    async def _generate(self, wish: Wish, name: str) -> tuple[str, str | None]:
        answer = await self._http.post(wish.path, json=wish.body, headers={"x-request-id": name})
        return judge_text(wish, answer, name)


Ending = tuple[str, str | None]


def judge_vectors(
    known: Known, indices: Sequence[int], body: dict[str, Any], answer: httpx.Response, name: str
) -> Ending:
    """Say how a request for vectors ended, and what is wrong with that."""
    if (end := _failed(answer, name)) is not None:
        return end
    fault = known.fault_of(indices, body, answer.json())
    return "wrong" if fault else "answered", fault


def judge_text(wish: Wish, answer: httpx.Response, name: str) -> Ending:
    """Say how a request for text ended; a stream that was cut off has to say so."""
    if (end := _failed(answer, name)) is not None:
        return end
    read = read_stream if wish.body.get("stream") else read_answer
    last = answer.text.rstrip().rpartition("\n\n")[2].removeprefix("data: ")
    if read is read_stream and last.startswith('{"error"'):
        return "broken off", error_fault(last)
    fault = wish.fault_of(answer.status_code, answer.text, read)
    return "wrong" if fault else "answered", fault


def _failed(answer: httpx.Response, name: str) -> Ending | None:
    """Judge an answer that is no success, or that is another request's."""
    if (echo := answer.headers.get("x-request-id")) != name:
        return "wrong", f"the answer is that of {echo!r}"
    if answer.status_code == 200:
        return None
    if answer.status_code in ALLOWED:
        return "refused", error_fault(answer.content)
    return "wrong", f"status {answer.status_code}: {answer.text[:200]}"


class Hand:
    """Kills and freezes engines, one after another."""

    def __init__(self, server: RunningServer, replicas: int, seed: int) -> None:
        """Prepare to strike at the engines of `server`."""
        assert server.pid is not None
        self.blows: list[Blow] = []
        self.pids: set[int] = set()  # of every process that was ever in the tree
        self._pid = server.pid
        self._url = server.url
        self._replicas = replicas
        self._rng = np.random.default_rng([seed, 1])

    async def run(self, every_s: float, until: float) -> None:
        """Strike every so many seconds, once the last blow is recovered from."""
        while time.monotonic() + every_s < until:
            started = time.monotonic()
            await self._strike()
            await asyncio.sleep(max(0.0, started + every_s - time.monotonic()))

    async def _strike(self) -> None:
        tree = tree_of(self._pid)
        self.pids |= {process.pid for process in tree.values()}
        engines = sorted(role for role in tree if role.startswith("engine"))
        role = str(self._rng.choice(engines))
        number = signal.SIGKILL if self._rng.random() < 0.5 else signal.SIGSTOP
        blow = Blow(role, number.name)
        self.blows.append(blow)
        began = time.monotonic()
        tree[role].send_signal(number)
        deadline = began + RECOVERY_LIMIT_S
        while time.monotonic() < deadline:
            if not _lives(tree[role]) and await self._all_ready():
                blow.recovered_s = time.monotonic() - began
                return
            await asyncio.sleep(0.1)

    async def _all_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            metrics = await metrics_of(self._url)
            ready = [n for name, n in metrics.items() if name.startswith("rose_engine_ready{")]
            return min(ready) >= self._replicas
        return False

    def left(self) -> list[int]:
        """Processes of the tree that still run."""
        return [pid for pid in self.pids if psutil.pid_exists(pid) and _lives(psutil.Process(pid))]


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass
class Run:
    """One run, and the server before and after it."""

    found: Found
    sent: int
    before: dict[str, float]
    after: dict[str, float]


async def chaos(server: RunningServer, hand: Hand, options: argparse.Namespace) -> Run:
    """Learn what is right, then load and strike, and wait for the counters to come back."""
    limits = httpx.Limits(max_connections=2 * options.clients)
    client = httpx.AsyncClient(base_url=server.url, limits=limits, timeout=ANSWER_LIMIT_S)
    async with client as http:
        models = (options.embedder, options.llm)
        target = await learn_target(http, models, options.seed, options.prompts)
        before = await idle_metrics(server.url)
        until = time.monotonic() + 60 * options.minutes
        clients = Clients(http, target, options.seed)
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run(options.clients, until))
            group.create_task(hand.run(options.every, until))
    clients.found.blows = hand.blows
    after = await idle_metrics(server.url)
    return Run(clients.found, clients.sent, before, after)


def answered_by(metrics: dict[str, float]) -> float:
    """How many requests a server says that it has answered on the routes under load."""
    return sum(
        value
        for name, value in metrics.items()
        if name.startswith("rose_requests_total{") and any(f'"{path}"' in name for path in PATHS)
    )


def summarise(report: Report, run: Run) -> None:
    """Turn what the clients saw into tables and bounds."""
    found = run.found
    report.check(
        "requests that ended", f"{found.count()} of {run.sent}", "all", found.count() == run.sent
    )
    lost = found.count("lost", "stuck")
    report.check("requests without an answer", lost, "0", not lost)
    wrong = len(found.faults)
    report.check("answers and errors that are wrong", wrong, "0", not wrong)
    for fault in found.faults[:20]:
        print(f"  {fault}", file=sys.stderr)
    # Requests with an unknown route or method are counted by the server under other names.
    served = answered_by(run.after) - answered_by(run.before)
    good = sum(n for (kind, end), n in found.ends.items() if kind != "malformed")
    known = good - sum(n for (_, end), n in found.ends.items() if end == "cancelled")
    once = known <= served <= run.sent
    report.check("answers that the server counted", f"{served:g}", f"{known} to {run.sent}", once)
    busy = "; ".join(f"`{name}` {value:g}" for name, value in busy_gauges(run.after).items())
    report.check("gauges that did not come back", busy or "none", "none", not busy)
    _summarise_blows(report, found.blows)
    ends = sorted({end for _, end in found.ends})
    kinds = sorted({kind for kind, _ in found.ends})
    rows = [[kind, *(found.ends[kind, end] for end in ends)] for kind in kinds]
    report.table("how requests ended", ["kind", *ends], rows)
    rows = [[kind, *_percentiles(times)] for kind, times in sorted(found.seconds.items())]
    report.table("time to a good answer", ["kind", "p50 s", "p99 s", "max s"], rows)


def _summarise_blows(report: Report, blows: Sequence[Blow]) -> None:
    open_ones = [blow for blow in blows if blow.recovered_s is None]
    value = f"{len(blows) - len(open_ones)} of {len(blows)}"
    report.check("blows recovered from", value, "all", bool(blows) and not open_ones)
    rows = []
    for what in sorted({blow.what for blow in blows}):
        times = [b.recovered_s for b in blows if b.what == what and b.recovered_s is not None]
        if times:
            rows.append([what, len(times), f"{statistics.median(times):.1f}", f"{max(times):.1f}"])
    columns = ["signal", "times", "p50 s", "max s"]
    report.table("from the signal until every replica is ready again", columns, rows)


def _percentiles(seconds: Sequence[float]) -> list[str]:
    return [f"{np.percentile(seconds, p):.2f}" for p in (50, 99, 100)]


@contextlib.contextmanager
def _private_tmp() -> Iterator[Path]:
    """A folder for the server's temporary files, to see what it leaves there."""
    with tempfile.TemporaryDirectory(prefix="rose-chaos-") as folder:
        yield Path(folder)


def main() -> int:
    """Run the tool."""
    options = _options()
    report = Report(
        "chaos",
        "Chaos",
        f"`rose serve` with {options.replicas} replicas of {options.embedder} and of "
        f"{options.llm}, under load by {options.clients} clients for {options.minutes:g} minutes: "
        f"embeddings of a few texts and of {LARGE}, completions, streams; a fifth cancelled, a "
        f"tenth malformed. Every {options.every:g} s an engine is killed with SIGKILL or frozen "
        "with SIGSTOP. Vectors and texts are compared with those taken before. Client and server "
        "share the machine.",
    )
    folders = [options.models / name for name in (options.embedder, options.llm)]
    limits = ("--dtype", "float32", "--max-batch-tokens", "2048", "--kv-cache-memory", "32MiB")
    with _private_tmp() as tmp:
        environment = {"TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
        arguments = (*limits, "--replicas", str(options.replicas))
        arguments += ("--gateway-workers", str(options.gateway_workers))
        with serve(folders, *arguments, environment=environment) as server:
            hand = Hand(server, options.replicas, options.seed)
            files = open_files(server.pid)
            run = asyncio.run(chaos(server, hand, options))
            summarise(report, run)
            _summarise_log(report, server)
            _check_files(report, files, open_files(server.pid))
            hand.pids |= {process.pid for process in tree_of(server.pid or 0).values()}
        left = hand.left()
        report.check("processes left after the stop", left or "none", "none", not left)
        files_left = sorted(str(path.relative_to(tmp)) for path in tmp.rglob("*"))
        report.check("files left after the stop", files_left or "none", "none", not files_left)
    report.data["blows"] = [vars(blow) for blow in run.found.blows]
    report.data["ends"] = {json.dumps(key): n for key, n in run.found.ends.items()}
    return report.finish(options)


def _summarise_log(report: Report, server: RunningServer) -> None:
    faults = [line for line in server.troubles() if line.startswith("Traceback")]
    report.check("tracebacks in the log", len(faults), "0", not faults)
    if faults and server.log:
        print(server.log.read_text(errors="replace")[-8000:], file=sys.stderr)


def _check_files(report: Report, before: dict[str, int], after: dict[str, int]) -> None:
    for role in (role for role in before if not role.startswith("engine")):
        kept = after.get(role, 0) <= before[role] + 4
        report.check(f"open files of the {role}", after.get(role), f"about {before[role]}", kept)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the models' folders")
    parser.add_argument("--embedder", default="all-MiniLM-L6-v2")
    parser.add_argument("--llm", default="SmolLM2-135M-Instruct")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--gateway-workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between blows (20)")
    parser.add_argument("--clients", "-c", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=12, help="different ones to the LLM (12)")
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
