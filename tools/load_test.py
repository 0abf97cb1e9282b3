#!/usr/bin/env python3
"""Load a server with embedding requests from many clients, one in ten of them malformed.

Every good answer is compared with the vector that the server gave for the text alone, before the
load; every bad request has to be refused with its status and the field at fault. Memory of the
server's processes has to stay flat and its log free of warnings.
"""

import argparse
import asyncio
import base64
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from rich.progress import Progress

from tools.mistakes import Mistake, embedding_mistakes
from tools.report import MODELS, Report, add_output_options
from tools.server import MemoryWatch, RunningServer, serve
from tools.texts import cosines, mixed_texts

POOL = 200  # texts
MOST_TEXTS = 4  # of a request
SAME = 0.99999  # cosine
FLAT_MIB, FLAT_SHARE = 16, 0.03  # growth of a process that counts as none
COSTLY_EVERY = 500  # mistakes
PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True)
class Known:
    """Texts with the answers that a server owes for them.

    Attributes:
        model: Its name.
        width: Of a whole vector.
        texts: To send.
        ids: Their token ids.
        vectors: float32 [texts, width].
    """

    model: str
    width: int
    texts: list[str]
    ids: list[list[int]]
    vectors: np.ndarray

    def fault_of(self, indices: Sequence[int], body: dict[str, Any], answer: Any) -> str | None:  # noqa: ANN401
        """Say what is wrong with an answer for the texts `indices`; None if nothing is."""
        try:
            data, model = answer["data"], answer["model"]
            order = [item["index"] for item in data]
            rows = [_numbers(item["embedding"], body) for item in data]
        except (KeyError, TypeError, ValueError) as error:
            return f"the answer has the wrong form: {error!r}"
        if model != self.model or order != list(range(len(indices))):
            return f"model {model!r}, items {order}"
        width = body.get("dimensions") or self.width
        if {len(row) for row in rows} != {width}:
            return f"vectors of {[len(row) for row in rows]} numbers instead of {width}"
        expected = self.vectors[list(indices)][:, :width]
        least = cosines(np.stack(rows), expected).min()
        if not least >= SAME:
            return f"cosine {least:.7f} for the texts {list(indices)}"
        tokens = sum(len(self.ids[i]) for i in indices)
        if answer["usage"]["prompt_tokens"] != tokens:
            return f"usage {answer['usage']} instead of {tokens} tokens"
        return None


def _numbers(found: str | list[float], body: dict[str, Any]) -> np.ndarray:
    if not isinstance(found, str):
        return np.array(found, np.float32)
    kind = "<f2" if body.get("output_dtype") == "float16" else "<f4"
    return np.frombuffer(base64.b64decode(found, validate=True), kind).astype(np.float32)


@dataclass
class Load:
    """What a run found.

    Attributes:
        seconds: Of each good request that was answered, by its priority.
        statuses: How often each came.
        faults: What was wrong, one line each.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    good: int = 0
    bad: int = 0
    wall_s: float = 0.0


async def learn(http: httpx.AsyncClient, model: str, seed: int, pool: int = POOL) -> Known:
    """Ask for the vectors of a pool of texts, alone and one after another."""
    listed = (await http.get("/v1/models")).raise_for_status().json()["data"]
    facts = {item["id"]: item for item in listed}[model]
    texts, ids, rows = [], [], []
    for text in mixed_texts(2 * pool, seed, most_words=100):
        tokens = await _post(http, "/tokenize", {"model": model, "prompt": text})
        if len(tokens["tokens"]) > facts["max_model_len"] or len(texts) == pool:
            continue
        answer = await _post(http, "/v1/embeddings", {"model": model, "input": text})
        row = np.array(answer["data"][0]["embedding"], np.float32)
        if rows and (np.stack(rows) @ row).max() > 0.999:
            continue  # it could not be told from another
        texts.append(text)
        ids.append(tokens["tokens"])
        rows.append(row)
    return Known(model, facts["dimensions"], texts, ids, np.stack(rows))


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
    return (await http.post(path, json=body)).raise_for_status().json()


def draw_request(known: Known, rng: np.random.Generator) -> tuple[list[int], dict[str, Any]]:
    """Draw texts and a body that asks for them, in one of the many ways that are possible."""
    indices = rng.integers(0, len(known.texts), rng.integers(1, MOST_TEXTS + 1)).tolist()
    form = rng.choice(["text", "texts", "ids", "lists of ids"])
    if form in ("text", "ids"):
        indices = indices[:1]
    source = known.texts if form.startswith("text") else known.ids
    items = [source[i] for i in indices]
    body: dict[str, Any] = {"input": items[0] if form in ("text", "ids") else items}
    body["model"] = known.model
    widths = (None, known.width, known.width // 2, 32)
    choices: dict[str, Sequence[Any]] = {
        "dimensions": widths,
        "encoding_format": ("float", "base64", "base64", None),
        "output_dtype": ("float32", "float16", None, None),
        "user": ("a client", None),
        "priority": ("online", "bulk", None, None),
        "no_such_field": ({"x": [1]}, None),
    }
    for name, values in choices.items():
        if rng.random() < 0.5:
            body[name] = values[int(rng.integers(len(values)))]
    return indices, body


class Attack:
    """The clients, and what they find."""

    def __init__(
        self, http: httpx.AsyncClient, known: Known, mistakes: Sequence[Mistake], seed: int
    ) -> None:
        """Prepare to send what `seed` draws."""
        self.load = Load()
        self._http = http
        self._known = known
        self._seed = seed
        self._cheap = [mistake for mistake in mistakes if not mistake.costly]
        self._costly = [mistake for mistake in mistakes if mistake.costly]

    async def send(self, number: int) -> None:
        """Send request `number`, which alone decides what it is."""
        try:
            if number % 10 == 9:
                await self._send_bad(number // 10)
            else:
                await self._send_good(np.random.default_rng([self._seed, number]))
        except httpx.HTTPError as error:
            self.load.faults.append(f"request {number}: {error!r}")

    async def _send_good(self, rng: np.random.Generator) -> None:
        indices, body = draw_request(self._known, rng)
        began = time.perf_counter()
        answer = await self._http.post("/v1/embeddings", json=body)
        priority = body.get("priority") or "online"
        self.load.seconds.setdefault(priority, []).append(time.perf_counter() - began)
        self.load.good += 1
        self.load.statuses[answer.status_code] += 1
        if answer.status_code != 200:
            self.load.faults.append(f"status {answer.status_code}: {answer.text[:200]}")
        elif fault := self._known.fault_of(indices, body, answer.json()):
            self.load.faults.append(fault)

    async def _send_bad(self, number: int) -> None:
        kinds = self._costly if self._costly and number % COSTLY_EVERY == 7 else self._cheap
        mistake = kinds[number % len(kinds)]
        answer = await self._http.request(
            mistake.method, mistake.path, content=mistake.body or None, headers=mistake.headers
        )
        self.load.bad += 1
        self.load.statuses[answer.status_code] += 1
        if fault := mistake.fault_of(answer.status_code, answer.content):
            self.load.faults.append(fault)


async def attack(
    url: str,
    model: str,
    requests: int,
    clients: int,
    seed: int = 0,
    pool: int = POOL,
    progress: Progress | None = None,
) -> Load:
    """Send `requests` from `clients` that each wait for an answer before they send again.

    Args:
        url: Of a server on this machine, without a path.
        model: Name of an embedder that it serves.
        seed: Other texts and requests.
        pool: Different texts.
    """
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as http:
        known = await learn(http, model, seed, pool)
        limit = (await http.get("/v1/models")).json()["data"]
        max_len = next(item["max_model_len"] for item in limit if item["id"] == model)
        mistakes = embedding_mistakes(model, known.width, max_len)
        attacker = Attack(http, known, mistakes, seed)
        numbers = iter(range(requests))
        task = progress.add_task("requests", total=requests) if progress else None

        async def client() -> None:
            for number in numbers:
                await attacker.send(number)
                if progress and task is not None:
                    progress.advance(task)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        attacker.load.wall_s = time.perf_counter() - began
    return attacker.load


def summarise(
    report: Report, load: Load, memory: MemoryWatch, server: RunningServer, requests: int
) -> None:
    """Turn what was found into tables and bounds."""
    sent = load.good + load.bad
    report.check("requests answered", f"{sent} of {requests}", "all", sent == requests)
    report.check("answers that are wrong", len(load.faults), "0", not load.faults)
    for fault in load.faults[:20]:
        print(f"  {fault}", file=sys.stderr)
    summarise_server(report, memory, server)
    rows = [
        [priority, len(seconds), *(f"{1000 * np.percentile(seconds, p):.0f}" for p in PERCENTILES)]
        for priority, seconds in sorted(load.seconds.items(), reverse=True)
    ]
    columns = ["priority", "requests", "p50 ms", "p90 ms", "p99 ms", "max ms"]
    report.table("good requests: time to the answer", columns, rows)
    statuses = ", ".join(
        f"{count} times {status}" for status, count in sorted(load.statuses.items())
    )
    report.notes.append(
        f"{load.good} good requests and {load.bad} malformed ones in {load.wall_s:.0f} s: "
        f"{sent / load.wall_s:.1f} a second. Answers: {statuses}."
    )


def summarise_server(report: Report, memory: MemoryWatch, server: RunningServer) -> None:
    """Hold memory and log of a server to their bounds."""
    for name, (early, late) in memory.growth().items():
        grown = late - early
        flat = grown <= max(FLAT_MIB, FLAT_SHARE * early)
        value = f"{early:.0f} to {late:.0f} MiB ({grown:+.1f})"
        bound = f"growth below {FLAT_MIB} MiB or {FLAT_SHARE:.0%}"
        report.check(f"memory of {name}, from a fifth of the run to its end", value, bound, flat)
    if server.log:
        troubles = server.troubles()
        report.check("lines of trouble in the log", len(troubles), "0", not troubles)
        print("".join(f"  {line}\n" for line in troubles[:20]), end="", file=sys.stderr)


def main() -> int:
    """Run the tool."""
    options = _options()
    report = Report(
        "load_test",
        "Embeddings under load",
        f"{options.requests} requests to /v1/embeddings from {options.clients} concurrent clients: "
        f"one to {MOST_TEXTS} texts of mixed length and language, as text or token ids, in "
        "different widths and encodings; one in ten is malformed. Client and server share the "
        "machine. Each vector is compared with the one of the same text asked for alone.",
    )
    if options.url:
        _run(report, RunningServer(options.url, options.pid), options.model, options)
    else:
        with serve([options.serve], "--dtype", "float32") as server:
            _run(report, server, options.serve.resolve().name, options)
    return report.finish(options)


def _run(report: Report, server: RunningServer, model: str, options: argparse.Namespace) -> None:
    with Progress(transient=True) as progress, MemoryWatch(server.pid) as memory:
        load = asyncio.run(
            attack(
                server.url,
                model,
                options.requests,
                options.clients,
                options.seed,
                progress=progress,
            )
        )
    summarise(report, load, memory, server, options.requests)


def loopback_url(text: str) -> str:
    """Take a URL of this machine only."""
    if urlsplit(text).hostname not in ("127.0.0.1", "localhost", "::1"):
        raise argparse.ArgumentTypeError("only a server on this machine is attacked")
    return text.rstrip("/")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", type=loopback_url, help="attack this server")
    where.add_argument(
        "--serve",
        type=Path,
        default=MODELS / "all-MiniLM-L6-v2",
        help="start a server for this model folder (default: all-MiniLM-L6-v2)",
    )
    parser.add_argument("--model", help="with --url: name of the embedder to ask")
    parser.add_argument("--pid", type=int, help="with --url: process whose tree's memory to watch")
    parser.add_argument("--requests", "-n", type=int, default=10_000)
    parser.add_argument("--clients", "-c", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser)
    options = parser.parse_args()
    if options.url and not options.model:
        parser.error("--url needs --model")
    return options


if __name__ == "__main__":
    sys.exit(main())
