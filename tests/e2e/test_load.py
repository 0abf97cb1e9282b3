"""Many clients at once, one request in ten malformed: the short form of tools/load_test.py."""

import asyncio

import httpx
import pytest

from tools.load_test import attack
from tools.mistakes import embedding_mistakes, generation_mistakes
from tools.server import MemoryWatch, RunningServer

pytestmark = [pytest.mark.golden, pytest.mark.slow]

MODEL = "all-MiniLM-L6-v2"
REQUESTS, CLIENTS = 300, 16


def test_good_requests_get_their_vectors_and_bad_ones_their_errors(server):
    tree = RunningServer(server.url, server.process.pid, server.log_path)
    with MemoryWatch(tree.pid, interval_s=0.1) as memory:
        load = asyncio.run(attack(server.url, MODEL, REQUESTS, CLIENTS))
    assert load.faults == []
    assert (load.good, load.bad) == (REQUESTS * 9 // 10, REQUESTS // 10)
    assert tree.troubles() == []
    growth = {name: late - early for name, (early, late) in memory.growth().items()}
    assert set(growth) == {
        "supervisor",
        "gateway",
        f"engine {MODEL}",
        "engine SmolLM2-135M-Instruct",
    }
    assert max(growth.values()) < 64, growth  # MiB, warm-up included


def test_every_mistake_is_refused_by_its_field(server):
    facts = {item["id"]: item for item in httpx.get(f"{server.url}/v1/models").json()["data"]}
    llm = facts["SmolLM2-135M-Instruct"]
    mistakes = [
        *embedding_mistakes(MODEL, facts[MODEL]["dimensions"], facts[MODEL]["max_model_len"]),
        *generation_mistakes(llm["id"], llm["max_model_len"]),
    ]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for mistake in mistakes:
            answer = http.request(
                mistake.method, mistake.path, content=mistake.body or None, headers=mistake.headers
            )
            assert mistake.fault_of(answer.status_code, answer.content) is None
    assert RunningServer(server.url, log=server.log_path).troubles() == []
