"""Concurrent single requests through HTTP: tokenisation, the wire and the network included."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tools.gpu.checkpoints import words
from tools.gpu.stage import Context, percentiles
from tools.server import serve

CLIENTS = (1, 2, 4, 8, 16)
TOKENS, REQUESTS = 512, 30


def run(context: Context) -> None:
    """Serve the embedder and load it from more and more clients."""
    clients, tokens, requests = ((1, 2), 16, 3) if context.dry else (CLIENTS, TOKENS, REQUESTS)
    options = ["--device", str(context.device), "--dtype", context.dtype, "--task", "embed"]
    options += ["--max-model-len", str(2 * tokens)]
    with serve([context.folder / "qwen3"], *options) as server:
        url = f"{server.url}/v1/embeddings"
        _load(url, clients[-1], tokens, 3)  # warms up
        rows = [[n, *percentiles(_load(url, n, tokens, requests))] for n in clients]
    columns = ["clients", "p50 ms", "p90 ms", "p99 ms", "max ms"]
    context.report.table(f"Single requests of {tokens} tokens over HTTP, qwen3", columns, rows)


def _load(url: str, clients: int, tokens: int, requests: int) -> list[float]:
    """Return the milliseconds of every request."""

    def client(number: int) -> list[float]:
        times = []
        with httpx.Client(timeout=120) as session:
            for turn in range(requests):
                body = {"model": "qwen3", "input": words(tokens, seed=requests * number + turn)}
                began = time.perf_counter()
                answer = session.post(url, content=json.dumps(body))
                times.append(1e3 * (time.perf_counter() - began))
                answer.raise_for_status()
        return times

    with ThreadPoolExecutor(clients) as pool:
        return [t for times in pool.map(client, range(clients)) for t in times]
