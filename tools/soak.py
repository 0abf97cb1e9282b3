#!/usr/bin/env python3
"""Soak a server: generation and embeddings at once, many cancelled, some malformed.

A third of the requests is cancelled at a random moment by closing the connection; a tenth is
malformed. What is answered has to be right: a vector equals that of the text alone, a text is a
beginning of what the prompt gave alone. Afterwards every counter of the server has to be back at
where it was before, and its memory flat.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from rich.progress import Progress

from tools.generation import (
    POOL,
    KnownTexts,
    Wish,
    draw_wish,
    learn_texts,
    read_answer,
    read_stream,
)
from tools.load_test import POOL as TEXTS
from tools.load_test import Known, draw_request, learn, loopback_url, summarise_server
from tools.mistakes import Mistake, embedding_mistakes, generation_mistakes
from tools.report import MODELS, Report, add_output_options
from tools.server import MemoryWatch, RunningServer, open_files, serve

ANSWER_LIMIT_S = 300  # a request that takes longer is stuck
SETTLE_S = 30  # time for the counters to come back
CANCEL_WITHIN_S = 2.0
IDLE = {  # gauges of a server that has nothing to do
    "rose_requests_in_flight": 1,  # the one that asks
    "rose_engine_requests_running": 0,
    "rose_engine_requests_queued": 0,
    "rose_engine_tokens_queued": 0,
    "rose_engine_sequences_running": 0,
    "rose_engine_sequences_waiting": 0,
    "rose_engine_kv_pages_used": 0,
}
Metrics = dict[str, float]
COUNTED = ("rose_engine_preemptions", "rose_engine_prefix_hit_tokens", "rose_disconnects")


@dataclass
class Found:
    """What the clients saw.

    Attributes:
        ends: How many requests of each kind ended how.
        faults: What was wrong, one line each.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Requests that ended."""
        return sum(self.ends.values())


@dataclass(frozen=True)
class Target:
    """What is known of the server's models before the soak."""

    vectors: Known
    texts: KnownTexts
    mistakes: Sequence[Mistake]


class Soak:
    """The clients."""

    def __init__(self, http: httpx.AsyncClient, target: Target, seed: int) -> None:
        """Prepare to send what `seed` draws."""
        self.found = Found()
        self._http = http
        self._target = target
        self._seed = seed

    async def send(self, number: int) -> None:
        """Send request `number`, which alone decides what it is and when it is cancelled."""
        rng = np.random.default_rng([self._seed, number])
        # Early moments are more frequent: there it is known by some parts of a server and not yet
        # by others.
        cancel_after = CANCEL_WITHIN_S * rng.random() ** 2 if rng.random() < 1 / 3 else None
        kind = self._kind(rng)
        try:
            async with asyncio.timeout(cancel_after or ANSWER_LIMIT_S):
                fault = await getattr(self, f"_{kind}")(rng)
        except TimeoutError:
            fault = None if cancel_after else f"no answer within {ANSWER_LIMIT_S} s"
            self.found.ends[kind, "cancelled" if cancel_after else "stuck"] += 1
        except httpx.HTTPError as error:
            fault = repr(error)
            self.found.ends[kind, "failed"] += 1
        else:
            self.found.ends[kind, "wrong" if fault else "answered"] += 1
        if fault:
            self.found.faults.append(f"request {number}, {kind}: {fault}")

    @staticmethod
    def _kind(rng: np.random.Generator) -> str:
        if rng.random() < 0.1:
            return "malformed"
        return str(rng.choice(["embedding", "text", "stream", "stream"]))

    async def send_one_of_each(self) -> list[str]:
        """Send a good request of each kind, and return what is wrong with the answers."""
        kinds = (self._embedding, self._text, self._stream)
        faults = [await kind(np.random.default_rng(self._seed)) for kind in kinds]
        return [f"afterwards: {fault}" for fault in faults if fault]

    async def _malformed(self, rng: np.random.Generator) -> str | None:
        mistake = self._target.mistakes[int(rng.integers(len(self._target.mistakes)))]
        answer = await self._http.request(
            mistake.method, mistake.path, content=mistake.body or None, headers=mistake.headers
        )
        return mistake.fault_of(answer.status_code, answer.content)

    async def _embedding(self, rng: np.random.Generator) -> str | None:
        indices, body = draw_request(self._target.vectors, rng)
        answer = await self._http.post("/v1/embeddings", json=body)
        if answer.status_code != 200:
            return f"status {answer.status_code}: {answer.text[:200]}"
        return self._target.vectors.fault_of(indices, body, answer.json())

    async def _text(self, rng: np.random.Generator) -> str | None:
        wish = draw_wish(self._target.texts, rng, stream=False)
        answer = await self._http.post(wish.path, json=wish.body)
        return wish.fault_of(answer.status_code, answer.text, read_answer)

    async def _stream(self, rng: np.random.Generator) -> str | None:
        wish: Wish = draw_wish(self._target.texts, rng, stream=True)
        async with self._http.stream("POST", wish.path, json=wish.body) as answer:
            text = "".join([piece async for piece in answer.aiter_text()])
        return wish.fault_of(answer.status_code, text, read_stream)


async def soak(
    url: str,
    models: tuple[str, str],
    requests: int,
    clients: int,
    seed: int = 0,
    prompts: int = POOL,
    pool: int = TEXTS,
    progress: Progress | None = None,
) -> tuple[Found, Metrics, Metrics]:
    """Learn, soak, and wait for the counters to come back.

    Args:
        url: Of the server.
        models: Names of the embedder and of the LLM.
        requests: To send.
        clients: That send at once, each its next request when the one before has ended.
        seed: Other texts and requests.
        prompts: Different ones.
        pool: Different texts to embed.

    Returns:
        What the clients saw, and the server's metrics before and after.
    """
    async with _client(url, clients) as http:
        target = await learn_target(http, models, seed, prompts, pool)
    before = await idle_metrics(url)
    async with _client(url, clients) as http:
        attacker = Soak(http, target, seed)
        numbers = iter(range(requests))
        task = progress.add_task("requests", total=requests) if progress else None

        async def client() -> None:
            for number in numbers:
                await attacker.send(number)
                if progress and task is not None:
                    progress.advance(task)

        await asyncio.gather(*(client() for _ in range(clients)))
    after = await idle_metrics(url)
    async with _client(url, 1) as http:
        attacker.found.faults += await Soak(http, target, seed).send_one_of_each()
    return attacker.found, before, after


def _client(url: str, clients: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=ANSWER_LIMIT_S)


async def learn_target(
    http: httpx.AsyncClient, models: tuple[str, str], seed: int, prompts: int, pool: int = TEXTS
) -> Target:
    """Ask for the vectors and texts that are right, of an embedder and an LLM, one by one."""
    embedder, llm = models
    listed = (await http.get("/v1/models")).raise_for_status().json()["data"]
    limits = {item["id"]: item["max_model_len"] for item in listed}
    vectors = await learn(http, embedder, seed, pool)
    mistakes = [
        *embedding_mistakes(embedder, vectors.width, limits[embedder]),
        *generation_mistakes(llm, limits[llm]),
    ]
    cheap = [mistake for mistake in mistakes if not mistake.costly]
    return Target(vectors, await learn_texts(http, llm, seed, prompts), cheap)


async def metrics_of(url: str) -> Metrics:
    """Read the metrics of a server by name and labels."""
    async with _client(url, 1) as http:
        text = (await http.get("/metrics")).raise_for_status().text
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def idle_metrics(url: str) -> Metrics:
    """Read the metrics as soon as the server is idle, or when it had the time to be."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        metrics = await metrics_of(url)
        if not busy_gauges(metrics) or time.monotonic() > deadline:
            return metrics
        await asyncio.sleep(0.5)


def busy_gauges(metrics: Metrics) -> Metrics:
    """The gauges that are not those of an idle server."""
    return {
        name: value
        for name, value in metrics.items()
        if value != IDLE.get(name.split("{")[0], value)
    }


def summarise(
    report: Report,
    found: Found,
    before: Metrics,
    after: Metrics,
    requests: int,
) -> None:
    """Turn what was seen into tables and bounds."""
    stuck = sum(count for (_, end), count in found.ends.items() if end == "stuck")
    report.check("requests that ended", f"{found.total} of {requests}", "all", not stuck)
    report.check("answers that are wrong", len(found.faults), "0", not found.faults)
    for fault in found.faults[:20]:
        print(f"  {fault}", file=sys.stderr)
    missing = sorted(set(IDLE) - {name.split("{")[0] for name in after})
    report.check("gauges that /metrics lacks", ", ".join(missing) or "none", "none", not missing)
    busy = "; ".join(f"`{name}` {value:g}" for name, value in busy_gauges(after).items())
    report.check("gauges that did not come back", busy or "none", "none", not busy)
    ends = sorted({end for _, end in found.ends})
    kinds = sorted({kind for kind, _ in found.ends})
    rows = [[kind, *(found.ends[kind, end] for end in ends)] for kind in kinds]
    report.table("how requests ended", ["kind", *ends], rows)
    rows = [
        [f"`{name}`", f"{value - before.get(name, 0):g}"]
        for name, value in after.items()
        if name.split("{")[0].removesuffix("_total") in COUNTED
    ]
    report.table("what the soak made the server do", ["counter", "by"], rows)


def main() -> int:
    """Run the tool."""
    options = _options()
    report = Report(
        "soak",
        "Soak",
        f"{options.requests} requests from {options.clients} clients at once: embeddings, "
        "completions and chats of random length, whole and as streams; a third is cancelled at a "
        f"random moment of its first {CANCEL_WITHIN_S:g} s, a tenth is malformed. The LLM has a "
        "pool of pages that is too small for all of them.",
    )
    with _server(options) as server, Progress(transient=True) as progress:
        files = open_files(server.pid)
        with MemoryWatch(server.pid) as memory:
            began = time.monotonic()
            models = (options.embedder, options.llm)
            found, before, after = asyncio.run(
                soak(
                    server.url,
                    models,
                    options.requests,
                    options.clients,
                    options.seed,
                    progress=progress,
                )
            )
            report.data["seconds"] = time.monotonic() - began
        summarise(report, found, before, after, options.requests)
        summarise_server(report, memory, server)
        for name, count in open_files(server.pid).items():
            kept = count <= files[name] + 4
            report.check(f"open files of {name}", count, f"about {files[name]}", kept)
    return report.finish(options)


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[RunningServer]:
    if options.url:
        yield RunningServer(options.url, options.pid)
        return
    folders = [options.models / name for name in (options.embedder, options.llm)]
    limits = ("--dtype", "float32", "--max-num-seqs", "16", "--kv-cache-memory", options.kv_memory)
    with serve(folders, *limits) as server:
        yield server


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", type=loopback_url, help="soak this server instead of starting one")
    parser.add_argument("--pid", type=int, help="with --url: process whose tree's memory to watch")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the models' folders")
    parser.add_argument("--embedder", default="all-MiniLM-L6-v2")
    parser.add_argument("--llm", default="SmolLM2-135M-Instruct")
    parser.add_argument("--kv-memory", default="20MiB", help="for pages of the LLM (20MiB)")
    parser.add_argument("--requests", "-n", type=int, default=2000)
    parser.add_argument("--clients", "-c", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
