#!/usr/bin/env python3
"""What the gateway costs: requests to a real gateway whose engine answers at once.

Beside it the floor: what HTTP frameworks and servers cost for the same bodies when nothing is
done with them. Litestar and granian are measured where they are installed
(`pip install litestar granian`); ROSE does not need them.
"""

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from rich.progress import Progress
from tokenizers import Tokenizer

from tools.http_load import measure, median_ms, post
from tools.report import MODELS, ROOT, Report, add_output_options
from tools.server import START_LIMIT_S, free_port
from tools.texts import text_of_tokens

SHORT_TOKENS, LONG_TOKENS, BATCH = 16, 512, 100
FRAMEWORKS = ("asgi", "starlette", "litestar")
SERVERS = ("uvicorn", "granian")
Figures = dict[tuple[str, int], list[tuple[float, float]]]


def bodies(model: Path) -> dict[str, bytes]:
    """The requests that are sent, by what they are called in the table."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rng = np.random.default_rng(0)

    def text(tokens: int) -> str:
        return text_of_tokens(rng, tokens, lambda text: len(tokenizer.encode(text).ids))

    short, long = text(SHORT_TOKENS), [text(LONG_TOKENS) for _ in range(BATCH)]
    many = f"{BATCH} texts of {LONG_TOKENS} tokens"
    wanted: dict[str, dict[str, Any]] = {
        f"a text of {SHORT_TOKENS} tokens, float": {"input": short},
        f"a text of {SHORT_TOKENS} tokens, base64": {"input": short, "encoding_format": "base64"},
        f"{many}, float": {"input": long},
        f"{many}, base64": {"input": long, "encoding_format": "base64"},
    }
    return {name: post("/v1/embeddings", body) for name, body in wanted.items()}


@contextlib.contextmanager
def gateway(model: Path) -> Iterator[int]:
    """A gateway before a stand-in engine; gives its port."""
    with tempfile.TemporaryDirectory(prefix="rose-tool-") as folder:
        address = f"ipc://{folder}/engine"
        port = free_port()
        engine = [sys.executable, "-m", "tools.stand_in_engine", str(model), address]
        front = [sys.executable, "-m", "rose", "gateway", "--engine", f"model={address}"]
        with _running(engine), _running([*front, "--port", str(port)]):
            _wait(f"http://127.0.0.1:{port}/ready")
            yield port


@contextlib.contextmanager
def floor(server: str, framework: str) -> Iterator[int]:
    """A route that reads a body and answers with a fixed vector; gives its port."""
    port = free_port()
    app = f"tools.http_floor:{framework}"
    command = {
        "uvicorn": ["-m", "uvicorn", app, "--log-level", "warning", "--no-access-log"],
        "granian": ["-m", "granian", app, "--interface", "asgi", "--log-level", "warning"],
    }[server]
    with _running([sys.executable, *command, "--port", str(port)]):
        _wait(f"http://127.0.0.1:{port}/ready")
        yield port


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _wait(url: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")


def measure_turns(
    ports: dict[str, int], requests: dict[str, bytes], options: argparse.Namespace
) -> dict[str, Figures]:
    """Measure each server with each request and number of clients, in turns."""
    found: dict[str, Figures] = {name: {} for name in ports}
    with Progress(transient=True) as progress:
        cells = [(n, c) for n in requests for c in options.clients]
        task = progress.add_task("requests", total=options.turns * len(cells) * len(ports))
        for _ in range(options.turns):
            for request, clients in cells:
                for name, port in ports.items():
                    turn = measure(port, [requests[request]], clients, options.seconds)
                    taken, rate = uvloop.run(turn)
                    found[name].setdefault((request, clients), []).append((median_ms(taken), rate))
                    progress.advance(task)
    return found


def rows_of(figures: Figures) -> list[list[str]]:
    """Rows of a table: request, clients, median of p50, median of requests a second."""
    rows = []
    for (request, clients), turns in figures.items():
        p50, rate = np.median(turns, 0)
        rows.append([request, str(clients), f"{p50:.2f}", f"{rate:,.0f}"])
    return rows


def main() -> int:
    """Run the tool."""
    options = _options()
    report = Report(
        "gateway_cost",
        "Cost of the gateway",
        "Requests to `POST /v1/embeddings` of a gateway whose engine answers at once; client, "
        f"gateway and engine share the machine. Median of {options.turns} turns of "
        f"{options.seconds:g} s. The floor is a route of the same framework and server that reads "
        "the body and answers with a vector that is ready, all in the same turns.",
    )
    requests = bodies(options.model)
    pairs = [
        (server, framework)
        for server in SERVERS
        for framework in FRAMEWORKS
        if all(importlib.util.find_spec(n) for n in (server, framework) if n != "asgi")
    ]
    short = {name: body for name, body in requests.items() if str(BATCH) not in name}
    with contextlib.ExitStack() as stack:
        rose = {"ROSE": stack.enter_context(gateway(options.model))}
        whole = measure_turns(rose, requests, options)["ROSE"]
        columns = ["request", "clients", "p50, ms", "requests/s"]
        report.table("gateway, ZeroMQ and engine, without the model", columns, rows_of(whole))
        report.data["gateway"] = rows_of(whole)
        floors = {f"{f} on {s}": stack.enter_context(floor(s, f)) for s, f in pairs}
        one = dict([next(iter(short.items()))])
        found = measure_turns(floors, one, options)
    rows = [[name, *row[1:]] for name, figures in found.items() for row in rows_of(figures)]
    report.table(f"the floor: {next(iter(one))}", ["what", *columns[1:]], rows)
    report.data["floor"] = rows
    return report.finish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODELS / "all-MiniLM-L6-v2")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn (default 2)")
    add_output_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
