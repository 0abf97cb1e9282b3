"""Starting, failing and stopping: exit codes, messages, and nothing left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.e2e.conftest import Server, alive

pytestmark = pytest.mark.golden


def wait_gone(pids, timeout=10):
    deadline = time.monotonic() + timeout
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_whole_tree_with_exit_code_0(minilm, tmp_path, number):
    server = Server(minilm, "--max-batch-tokens", "512", log=tmp_path / "log").wait_ready()
    children = server.children()
    assert len(children) == 2
    assert server.stop(number) == 0
    assert wait_gone(children) == []
    assert "Traceback" not in server.log


def test_no_orphans_when_the_supervisor_is_killed(minilm, tmp_path):
    server = Server(minilm, "--max-batch-tokens", "512", log=tmp_path / "log").wait_ready()
    children = server.children()
    server.stop(signal.SIGKILL)
    assert wait_gone(children) == []


def ask(server):
    body = {"model": "all-MiniLM-L6-v2", "input": "a red kite"}
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=30)


@pytest.mark.parametrize(
    ("victim", "number"),
    [(0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGKILL)],
    ids=["engine killed", "engine frozen", "gateway killed"],
)
def test_a_lost_process_is_started_again(minilm, tmp_path, victim, number):
    server = Server(minilm, "--max-batch-tokens", "512", log=tmp_path / "log").wait_ready()
    vector = ask(server).json()["data"][0]["embedding"]
    before = server.children()
    os.kill(before[victim], number)
    began = time.monotonic()
    while server.children() == before or before[victim] in server.children():
        time.sleep(0.1)
        assert time.monotonic() - began < 60, server.log
    server.wait_ready()
    assert ask(server).json()["data"][0]["embedding"] == vector
    assert server.stop() == 0
    assert wait_gone(before) == []


def test_requests_under_way_are_answered_when_the_engine_dies(minilm, tmp_path):
    server = Server(minilm, "--max-batch-tokens", "512", log=tmp_path / "log").wait_ready()
    answers = []

    def work():
        body = {"model": "all-MiniLM-L6-v2", "input": ["many words here " * 60] * 300}
        began = time.monotonic()
        answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
        answers.append((answer, time.monotonic() - began))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    server.wait_busy(4)
    os.kill(server.children()[0], signal.SIGKILL)
    killed = time.monotonic()
    for thread in threads:
        thread.join()
    assert time.monotonic() - killed < 5
    for answer, _ in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["message"]
    assert ask(server).status_code == 503
    server.wait_ready()
    assert ask(server).status_code == 200
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json"),
        ({"model_type": "bert_of_tomorrow"}, "bert_of_tomorrow"),
    ],
)
def test_a_folder_that_cannot_be_served_says_why(tmp_path, config, message):
    folder = tmp_path / "model"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    server = Server(folder, log=tmp_path / "log")
    assert server.process.wait(60) == 1
    assert "Traceback" not in server.log
    assert message in server.log


def test_a_port_in_use_is_said_before_anything_starts(minilm):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "rose", "serve", str(minilm), "--port", port]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert time.monotonic() - began < 10


def test_work_under_way_is_finished_when_asked_to_stop(minilm, tmp_path):
    server = Server(minilm, "--max-batch-tokens", "512", log=tmp_path / "log").wait_ready()
    texts = ["many words here " * 30] * 100
    answers = []

    def ask():
        body = {"model": "all-MiniLM-L6-v2", "input": texts}
        answers.append(httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120))

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_busy(1)
    assert server.stop() == 0
    thread.join()
    assert answers[0].status_code == 200
    assert len(answers[0].json()["data"]) == 100
