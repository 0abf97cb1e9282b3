#!/usr/bin/env python3
"""Offer a server three times what it can do, and see that it goes on doing it.

First the capacity is measured with clients that wait for their answers. Then requests come at a
fixed multiple of that rate whether or not earlier ones were answered. The server has to keep its
rate of good answers, to refuse the rest with 429 and `Retry-After`, to answer what it accepts
within a bounded time, and to keep its memory.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tools.load_test import Known, learn
from tools.mistakes import error_fault
from tools.report import MODELS, Report, add_output_options
from tools.server import MemoryWatch, RunningServer, serve
from tools.soak import busy_gauges, idle_metrics

ANSWER_LIMIT_S = 120.0
WARM_UP_S = 2.0
LEAST_GOODPUT = 0.9  # of the capacity
FLAT_MIB, FLAT_SHARE = 32, 0.05


@dataclass
class Offered:
    """What became of the requests of one phase.

    Attributes:
        sent: How many.
        began: When the phase began, on the monotonic clock.
        seconds: Of each good answer: (when it came, how long it took).
        refused: How long each 429 took.
        statuses: How often each came; 0 is no answer.
        faults: What was wrong, one line each.
    """

    sent: int = 0
    began: float = field(default_factory=time.monotonic)
    seconds: list[tuple[float, float]] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def rate(self, begin: float, end: float) -> float:
        """Good answers a second that came between two moments."""
        return sum(begin <= came < end for came, _ in self.seconds) / (end - begin)


class Sender:
    """Sends the same kind of request again and again: some texts whose vectors are known."""

    def __init__(self, http: httpx.AsyncClient, known: Known, texts: int, seed: int) -> None:
        """Prepare to send requests of `texts` texts, drawn by `seed`."""
        self._http = http
        self._known = known
        self._texts = texts
        self._seed = seed

    async def send(self, offered: Offered) -> None:
        """Send one request and note what comes."""
        offered.sent += 1
        rng = np.random.default_rng([self._seed, offered.sent])
        indices = rng.integers(0, len(self._known.texts), self._texts).tolist()
        body: dict[str, Any] = {
            "model": self._known.model,
            "input": [self._known.texts[i] for i in indices],
            "encoding_format": "base64",
        }
        began = time.monotonic()
        try:
            answer = await self._http.post("/v1/embeddings", json=body)
        except httpx.HTTPError as error:
            offered.statuses[0] += 1
            offered.faults.append(f"no answer: {error!r}")
            return
        now = time.monotonic()
        offered.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            offered.seconds.append((now, now - began))
            fault = self._known.fault_of(indices, body, answer.json())
        else:
            offered.refused.append(now - began)
            fault = refusal_fault(answer)
        if fault:
            offered.faults.append(fault)


def refusal_fault(answer: httpx.Response) -> str | None:
    """Say what is wrong with an answer that is no success; None if it is a proper 429."""
    if answer.status_code != 429:
        return f"status {answer.status_code}: {answer.text[:200]}"
    if not answer.headers.get("retry-after", "").isdigit():
        return f"429 with Retry-After {answer.headers.get('retry-after')!r}"
    return error_fault(answer.content)


async def closed_loop(sender: Sender, clients: int, seconds: float) -> Offered:
    """Let clients send, each its next request when the one before was answered."""
    offered = Offered()
    until = offered.began + seconds

    async def client() -> None:
        while time.monotonic() < until:
            await sender.send(offered)

    await asyncio.gather(*(client() for _ in range(clients)))
    return offered


async def open_loop(sender: Sender, per_second: float, seconds: float) -> Offered:
    """Send at a fixed rate, whatever is answered, and wait for the last answers."""
    offered = Offered()
    tasks: set[asyncio.Task[None]] = set()
    for number in range(round(per_second * seconds)):
        await asyncio.sleep(offered.began + number / per_second - time.monotonic())
        task = asyncio.create_task(sender.send(offered))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return offered


@dataclass
class Run:
    """Both phases.

    Attributes:
        capacity: Good answers a second under clients that wait.
        asked: Requests a second that were offered.
        offered: What became of them.
        gauges: Those of the server that did not come back.
    """

    capacity: float
    asked: float
    offered: Offered
    gauges: dict[str, float]


async def overload(server: RunningServer, memory: MemoryWatch, options: argparse.Namespace) -> Run:
    """Measure, then overload."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=512)
    client = httpx.AsyncClient(base_url=server.url, limits=limits, timeout=ANSWER_LIMIT_S)
    async with client as http:
        known = await learn(http, options.model, options.seed)
        sender = Sender(http, known, options.texts, options.seed)
        await closed_loop(sender, options.clients, WARM_UP_S)
        first = await closed_loop(sender, options.clients, options.measure)
        capacity = first.rate(first.began, first.began + options.measure)
        await idle_metrics(server.url)
        asked = options.times * capacity
        memory.samples.clear()  # what the warm-up took is no growth
        offered = await open_loop(sender, asked, options.seconds)
        offered.faults += first.faults
    return Run(capacity, asked, offered, busy_gauges(await idle_metrics(server.url)))


def summarise(report: Report, run: Run, options: argparse.Namespace) -> None:
    """Turn what was found into tables and bounds."""
    offered, capacity = run.offered, run.capacity
    answered = sum(offered.statuses.values()) - offered.statuses[0]
    report.check(
        "requests answered", f"{answered} of {offered.sent}", "all", answered == offered.sent
    )
    report.check("answers that are wrong", len(offered.faults), "0", not offered.faults)
    for fault in offered.faults[:20]:
        print(f"  {fault}", file=sys.stderr)
    # The queue fills first: only from then on the server is what is measured.
    full = options.places / capacity
    goodput = offered.rate(offered.began + full, offered.began + options.seconds)
    value = f"{goodput:.1f} of {capacity:.1f} requests/s"
    bound = f"at least {LEAST_GOODPUT:.0%}"
    report.check("goodput under overload", value, bound, goodput >= LEAST_GOODPUT * capacity)
    share = offered.statuses[429] / offered.sent
    report.check("refused with 429", f"{share:.0%}", "above 50 %", share > 0.5)
    # A full house is worked off at the capacity; what came last waits for all of it.
    most = 2 * options.places / capacity + 1
    times = [seconds for _, seconds in offered.seconds]
    p99 = float(np.percentile(times, 99)) if times else float("inf")
    bound = f"below {most:.1f} s: twice what {options.places} places take"
    report.check("latency of what is accepted, p99", f"{p99:.2f} s", bound, p99 < most)
    busy = "; ".join(f"`{name}` {value:g}" for name, value in run.gauges.items())
    report.check("gauges that did not come back", busy or "none", "none", not busy)
    rows = [["accepted", len(times), *_percentiles(times)]]
    rows.append(["refused", len(offered.refused), *_percentiles(offered.refused)])
    report.table("time to the answer", ["", "requests", "p50 s", "p99 s", "max s"], rows)
    report.notes.append(
        f"Capacity: {capacity:.1f} requests/s of {options.texts} texts from {options.clients} "
        f"clients that wait. Offered: {run.asked:.1f} requests/s for {options.seconds:g} s."
    )


def _percentiles(seconds: Sequence[float]) -> list[str]:
    return [f"{np.percentile(seconds, p):.3f}" if seconds else "" for p in (50, 99, 100)]


def _summarise_memory(report: Report, memory: MemoryWatch) -> None:
    for name, (early, late) in memory.growth().items():
        flat = late - early <= max(FLAT_MIB, FLAT_SHARE * early)
        value = f"{early:.0f} to {late:.0f} MiB"
        bound = f"growth below {FLAT_MIB} MiB or {FLAT_SHARE:.0%}"
        report.check(
            f"memory of {name}, from a fifth of the overload to its end", value, bound, flat
        )


def main() -> int:
    """Run the tool."""
    options = _options()
    report = Report(
        "overload",
        "Overload",
        f"Requests for the vectors of {options.texts} texts each, at {options.times:g} times the "
        f"rate that the server answers, whether or not earlier ones were answered. The server has "
        f"{options.places} places (`--max-concurrent-requests`). Client and server share the "
        "machine, so the client's part of refusing costs goodput too.",
    )
    folder = options.models / options.model
    limits = ("--dtype", "float32", "--max-concurrent-requests", str(options.places))
    with serve([folder], *limits) as server, MemoryWatch(server.pid) as memory:
        run = asyncio.run(overload(server, memory, options))
        troubles = server.troubles()
    report.check("lines of trouble in the log", len(troubles), "0", not troubles)
    print("".join(f"  {line}\n" for line in troubles[:20]), end="", file=sys.stderr)
    summarise(report, run, options)
    _summarise_memory(report, memory)
    return report.finish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the models' folders")
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="an embedder's folder")
    parser.add_argument("--times", type=float, default=3.0, help="of the capacity (3)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload (120)")
    parser.add_argument("--measure", type=float, default=15.0, help="seconds of measuring (15)")
    parser.add_argument("--texts", type=int, default=16, help="of a request (16)")
    parser.add_argument("--clients", "-c", type=int, default=32, help="that measure (32)")
    parser.add_argument("--places", type=int, default=64, help="requests at one time (64)")
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
