"""Several gateways behind one port, as a real process tree."""

import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Server, alive
from tests.tiny import save_bert


@pytest.fixture
def server(tmp_path):
    model = save_bert(tmp_path / "tiny-bert")
    options = ("--gateway-workers", "2", "--max-batch-tokens", "256", "--device", "cpu")
    server = Server(model, *options, log=tmp_path / "log")
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def embed(server):
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": "red tea"}, timeout=30)


def answered(server):
    """Answers by worker and status."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    pattern = r'^rose_requests_total\{route="/v1/embeddings",status="(\d+)",worker="(\d)"\} (\S+)'
    return {(w, s): float(n) for s, w, n in re.findall(pattern, text, re.MULTILINE)}


def test_workers_share_a_port_add_up_and_stop_together(server):
    children = server.children()
    assert len(children) == 3
    threads = [
        threading.Thread(target=lambda: [embed(server) for _ in range(15)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = answered(server)
    assert {status for _, status in found} == {"200"}
    assert sum(found.values()) == 60
    assert server.stop() == 0
    assert not any(map(alive, children))
    assert "Traceback" not in server.log


def test_a_worker_that_dies_is_started_again_and_no_connection_is_refused(server):
    victim = server.children()[-1]
    os.kill(victim, signal.SIGKILL)
    for _ in range(20):  # those that the system gave to it wait for its successor
        assert embed(server).status_code == 200
        time.sleep(0.02)
    deadline = time.monotonic() + 30
    while 'worker="1"' not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)
    server.wait_ready()
    assert server.stop() == 0


def test_sockets_that_somebody_removed_come_back(server):
    command = Path(f"/proc/{server.children()[0]}/cmdline").read_bytes().decode().split("\0")
    engine = Path(command[command.index("--bind") + 1].removeprefix("ipc://"))
    shutil.rmtree(engine.parent)
    deadline = time.monotonic() + 60
    while len(list(engine.parent.glob("*.sock"))) < 3:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)
    server.wait_ready()
    assert embed(server).status_code == 200
    assert server.stop() == 0
