"""Many clients at once: the short forms of tools/load_test.py and tools/soak.py."""

import asyncio

import httpx
import pytest

from tools.load_test import attack
from tools.mistakes import embedding_mistakes, generation_mistakes
from tools.server import MemoryWatch, RunningServer
from tools.soak import IDLE, busy_gauges, soak

pytestmark = [pytest.mark.golden, pytest.mark.slow]

MODEL, LLM = "all-MiniLM-L6-v2", "SmolLM2-135M-Instruct"
REQUESTS, CLIENTS = 300, 16


def test_good_requests_get_their_vectors_and_bad_ones_their_errors(server):
    tree = RunningServer(server.url, server.process.pid, server.log_path)
    with MemoryWatch(tree.pid, interval_s=0.1) as memory:
        load = asyncio.run(attack(server.url, MODEL, REQUESTS, CLIENTS, pool=80))
    assert load.faults == []
    assert (load.good, load.bad) == (REQUESTS * 9 // 10, REQUESTS // 10)
    assert tree.troubles() == []
    growth = {name: late - early for name, (early, late) in memory.growth().items()}
    assert set(growth) == {
        "supervisor",
        "gateway",
        f"engine {MODEL}",
        f"engine {LLM}",
    }
    assert max(growth.values()) < 64, growth  # MiB, warm-up included


def test_every_mistake_is_refused_by_its_field(server):
    facts = {item["id"]: item for item in httpx.get(f"{server.url}/v1/models").json()["data"]}
    llm = facts[LLM]
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


def test_nothing_is_left_of_requests_that_are_cancelled(server):
    found, _, after = asyncio.run(
        soak(server.url, (MODEL, LLM), requests=60, clients=12, prompts=8, pool=30)
    )
    assert found.faults == []
    assert found.total == 60
    assert sum(count for (_, end), count in found.ends.items() if end == "cancelled") > 5
    assert set(IDLE) <= {name.split("{")[0] for name in after}
    assert busy_gauges(after) == {}
    assert RunningServer(server.url, log=server.log_path).troubles() == []
