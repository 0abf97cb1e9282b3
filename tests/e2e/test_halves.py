"""`rose engine` and `rose gateway` started by hand, in any order, as processes of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.ports import free_port
from tests.tiny import edit_json, save_bert, save_decoder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = save_decoder(tmp_path_factory.mktemp("models") / "tiny-llama", "llama", seed=7)
    edit_json(
        path / "tokenizer_config.json",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    return path


@pytest.fixture
def run(tmp_path):
    """Start `rose` commands; what still runs at the end is killed."""
    started = []

    def start(*arguments):
        log = tmp_path / f"{len(started)}.log"
        command = [sys.executable, "-m", "rose", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        process.log = log
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def start_engine(run, model, address, *options):
    return run("engine", model, "--bind", address, "--max-batch-tokens", 256, *options)


def start_gateway(run, *engines, options=()):
    port = free_port()
    words = [word for engine in engines for word in ("--engine", engine)]
    process = run("gateway", *words, "--port", port, *options)
    process.url = f"http://127.0.0.1:{port}"
    return process


def wait_for_log(process, words, timeout=60):
    deadline = time.monotonic() + timeout
    while words not in process.log.read_text():
        assert process.poll() is None, process.log.read_text()
        assert time.monotonic() < deadline, process.log.read_text()
        time.sleep(0.05)


def wait_until(check, timeout=30):
    """Wait until `check` returns something true, and return that."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(httpx.TransportError):
            if found := check():
                return found
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def kill(process):
    process.kill()
    process.wait()


def stop(process):
    process.send_signal(signal.SIGTERM)
    return process.wait(30)


def embed(gateway, model="kites"):
    body = {"model": model, "input": "red tea"}
    return httpx.post(f"{gateway.url}/v1/embeddings", json=body, timeout=30)


def is_ready(gateway):
    return httpx.get(f"{gateway.url}/ready", timeout=30).status_code == 200


def test_replicas_come_and_go_behind_a_gateway_that_was_there_first(run, bert, tmp_path):
    """Gateway first, names given; engines die by kill -9 and are started again by hand."""
    one, two = f"ipc://{tmp_path}/1.sock", f"ipc://{tmp_path}/2.sock"
    gateway = start_gateway(run, f"kites={one}", f"kites={two}")
    wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
    answer = embed(gateway)
    assert (answer.status_code, is_ready(gateway)) == (503, False)
    assert answer.json()["error"]["message"]

    first = start_engine(run, bert, one)
    wait_until(lambda: is_ready(gateway))
    answer = embed(gateway)
    assert answer.status_code == 200
    assert answer.json()["model"] == "kites"
    vector = answer.json()["data"][0]["embedding"]

    second = start_engine(run, bert, two)
    wait_for_log(second, "ready at")
    assert f" engine {bert.name}: " in second.log.read_text()
    kill(first)
    answer = wait_until(lambda: (a := embed(gateway)).status_code == 200 and a)
    assert answer.json()["data"][0]["embedding"] == vector

    kill(second)
    began = time.monotonic()
    assert embed(gateway).status_code == 503
    assert time.monotonic() - began < 2
    assert not is_ready(gateway)

    first = start_engine(run, bert, one)
    wait_until(lambda: is_ready(gateway))
    assert embed(gateway).json()["data"][0]["embedding"] == vector
    assert (stop(gateway), stop(first)) == (0, 0)
    for process in (gateway, first):
        assert "Traceback" not in process.log.read_text()


def test_an_engine_tells_its_name_to_gateways_that_come_before_and_after_it(run, llama):
    """No name given, over tcp; the second gateway finds the engine as it was."""
    address = f"tcp://127.0.0.1:{free_port()}"
    first = start_gateway(run, address)
    wait_for_log(first, f"waiting for the engine at {address}")
    engine = start_engine(run, llama, address, "--name", "kites", "--max-num-seqs", 2)
    wait_until(lambda: is_ready(first))
    second = start_gateway(run, address)
    wait_until(lambda: is_ready(second))

    body = {"model": "kites", "max_tokens": 5, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "Hello"}]
    texts = []
    for gateway in (first, second):
        models = httpx.get(f"{gateway.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["kites"]
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200
        texts.append(answer.json()["choices"][0]["message"]["content"])
        assert stop(gateway) == 0
    assert texts[0] == texts[1] != ""
    assert stop(engine) == 0


def failure(*arguments):
    """Run a command that has to end with exit code 1, and return the one line that it writes."""
    command = [sys.executable, "-m", "rose", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    return done.stderr


@pytest.mark.parametrize("engine", ["tcp://10.0.0.7:9999", "kites=tcp://*:9999"])
def test_a_gateway_refuses_engines_beyond_this_machine(engine):
    address = engine.removeprefix("kites=")
    assert f"'{address}'" in failure("gateway", "--engine", engine, "--port", free_port())


@pytest.fixture
def taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_an_engine_whose_port_is_taken_says_so(bert, taken_port):
    address = f"tcp://127.0.0.1:{taken_port}"
    error = failure("engine", bert, "--bind", address, "--log-level", "warning")
    assert error.startswith(f"error: cannot listen on {address}: Address already in use")


def test_an_engine_leaves_the_socket_of_another_alone(bert, tmp_path):
    path = tmp_path / "1.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        error = failure("engine", bert, "--bind", f"ipc://{path}", "--log-level", "warning")
    assert f"ipc://{path}" in error


def test_a_gateway_whose_port_is_taken_says_so(taken_port):
    assert failure("gateway", "--engine", "a=ipc:///tmp/a.sock", "--port", taken_port) == (
        f"error: cannot listen on 127.0.0.1:{taken_port}: Address already in use\n"
    )
