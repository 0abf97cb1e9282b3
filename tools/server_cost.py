#!/usr/bin/env python3
"""What the server path costs: the same texts through `rose serve` and through `rose.Engine`.

Both have the same weights, threads and cores, and take turns. What HTTP, JSON, the gateway, ZeroMQ
and their processes add to a single text is the difference of the medians of two neighbouring turns;
what they cost under load is the ratio of texts per second.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
import uvloop
from rich.progress import Progress

from rose import Engine
from tools.http_load import Connection, post
from tools.report import MODELS, Report, add_output_options, cores
from tools.server import serve
from tools.texts import cosines, near_one, skewed_lengths, text_of_tokens

SINGLES = {16: 100, 128: 30}  # length of a text -> requests of a turn
MAX_LEN = 512


@dataclass(frozen=True)
class Load:
    """Requests that `clients` connections send, each the next when it has its answer."""

    name: str
    requests: list[bytes]
    clients: int
    texts: list[list[str]]

    @classmethod
    def of(cls, name: str, texts: Sequence[str], per_request: int, clients: int) -> "Load":
        """Cut texts into requests."""
        parts = [list(texts[i : i + per_request]) for i in range(0, len(texts), per_request)]
        bodies = [post("/v1/embeddings", {"input": part, "truncate": True}) for part in parts]
        return cls(name, bodies, clients, parts)


async def send(port: int, load: Load) -> list[bytes]:
    """Send each request of a load once; returns the answers in the order of the requests."""
    loop = asyncio.get_running_loop()
    waiting = list(enumerate(load.requests))[::-1]
    answers: dict[int, bytes] = {}

    async def client() -> None:
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        while waiting:
            index, request = waiting.pop()
            answers[index] = await connection.ask(request)
        connection.close()

    await asyncio.gather(*(client() for _ in range(load.clients)))
    return [answers[i] for i in range(len(load.requests))]


async def send_singles(port: int, request: bytes, count: int) -> list[float]:
    """Send a request again and again; returns the seconds of each."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await connection.ask(request)
        taken.append(time.perf_counter() - began)
    connection.close()
    return taken


def vectors_of(answers: Sequence[bytes]) -> np.ndarray:
    """The vectors of answers."""
    bodies = [json.loads(answer.split(b"\r\n\r\n", 1)[1]) for answer in answers]
    return np.array([item["embedding"] for body in bodies for item in body["data"]])


def compare_singles(
    report: Report, engine: Engine, port: int, text: str, tokens: int, turns: int
) -> None:
    """Measure a single text both ways, in turns."""
    count, request = SINGLES[tokens], post("/v1/embeddings", {"input": text})
    inside, outside = [], []
    uvloop.run(send_singles(port, request, count))
    for _ in range(turns):
        times = []
        for _ in range(count):
            began = time.perf_counter()
            engine.embed(text)
            times.append(time.perf_counter() - began)
        inside.append(1e3 * float(np.median(times)))
        outside.append(1e3 * float(np.median(uvloop.run(send_singles(port, request, count)))))
    added = np.array(outside) - np.array(inside)
    report.data[f"{tokens} tokens"] = {"inside_ms": inside, "outside_ms": outside}
    report.table(
        f"one text of {tokens} tokens, {turns} turns of {count} requests",
        ["in process, ms", "over HTTP, ms", "added, ms", "in single turns"],
        [[
            f"{np.median(inside):.2f}", f"{np.median(outside):.2f}", f"{np.median(added):.2f}",
            f"{added.min():.2f} to {added.max():.2f}",
        ]],
    )  # fmt: skip


def compare_loads(
    report: Report, engine: Engine, port: int, loads: Sequence[Load], turns: int
) -> None:
    """Measure many texts both ways, in turns."""
    rows = []
    texts = [text for part in loads[0].texts for text in part]
    expected = engine.embed(texts, truncate=True)
    with Progress(transient=True) as progress:
        for load in progress.track(loads, description="loads"):
            found = vectors_of(uvloop.run(send(port, load)))
            least = float(cosines(expected, found).min())
            report.check(
                f"least cosine, {load.name}", near_one(least), ">= 0.99999", least > 1 - 1e-5
            )
            ratios, rates = [], []
            for _ in range(turns):
                inside = _seconds(lambda: engine.embed(texts, truncate=True))
                outside = _seconds(lambda load=load: uvloop.run(send(port, load)))
                ratios.append(inside / outside)
                rates.append((len(texts) / inside, len(texts) / outside))
            report.data[load.name] = rates
            one, other = np.median(rates, 0)
            ratio = f"{np.median(ratios):.3f}"
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            rows.append([load.name, f"{one:.1f}", f"{other:.1f}", ratio, spread])
    report.table(
        f"{len(texts)} texts of 8 to {MAX_LEN} tokens, {turns} turns",
        ["load", "in process, texts/s", "over HTTP, texts/s", "ratio", "in single turns"],
        rows,
    )


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> int:
    """Run the tool."""
    options = _options()
    torch.set_num_threads(options.threads)
    report = Report(
        "server_cost",
        "Cost of the server path",
        f"`rose serve` against `rose.Engine` in this process, float32, {options.threads} threads "
        "each, text in, vectors out, in turns. The client, which is as cheap as one can be, shares "
        "the cores with the server. In process all texts are one call, sorted by length.",
    )
    flags = ["--max-model-len", str(MAX_LEN), "--dtype", "float32"]
    rng = np.random.default_rng(0)
    with (
        Engine(options.model, device="cpu", dtype="float32", max_model_len=MAX_LEN) as engine,
        serve([options.model], *flags) as server,
    ):
        port = urlsplit(server.url).port
        assert port is not None

        def text_of(tokens: int) -> str:
            return text_of_tokens(
                rng, tokens, lambda text: engine.encode(text, truncate=True).tokens
            )

        for tokens in SINGLES:
            compare_singles(report, engine, port, text_of(tokens), tokens, options.turns)
        texts = [text_of(tokens) for tokens in skewed_lengths(options.texts, 0)]
        loads = [
            Load.of(f"{options.texts} texts in a request, 1 client", texts, options.texts, 1),
            Load.of("32 texts in a request, 4 clients", texts, 32, 4),
            Load.of("1 text in a request, 16 clients", texts, 1, 16),
        ]
        compare_loads(report, engine, port, loads, options.turns)
    return report.finish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODELS / "all-MiniLM-L6-v2")
    parser.add_argument("--threads", type=int, default=min(2, cores()))
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=7)
    add_output_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
