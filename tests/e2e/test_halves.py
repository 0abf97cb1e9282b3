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

from rose.serving.cli import main
from tests.e2e.conftest import free_port
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


def start_gateway(run, *engines):
    port = free_port()
    words = [word for engine in engines for word in ("--engine", engine)]
    process = run("gateway", *words, "--port", port)
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


def test_an_engine_that_was_there_first_gives_its_name(run, llama):
    """Engine first, over tcp; the gateway asks it for its name and is not in its way."""
    address = f"tcp://127.0.0.1:{free_port()}"
    engine = start_engine(run, llama, address, "--name", "kites", "--max-num-seqs", 2)
    wait_for_log(engine, "ready at")
    gateway = start_gateway(run, address)
    wait_until(lambda: is_ready(gateway))
    models = httpx.get(f"{gateway.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["kites"]

    body = {"model": "kites", "max_tokens": 5, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "Hello"}]
    texts = []
    for _ in range(2):  # a gateway that is stopped and started again finds the engine as it was
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200
        texts.append(answer.json()["choices"][0]["message"]["content"])
        assert stop(gateway) == 0
        gateway = start_gateway(run, address)
        wait_until(lambda gateway=gateway: is_ready(gateway))
    assert texts[0] == texts[1] != ""
    assert (stop(engine), stop(gateway)) == (0, 0)


def test_a_gateway_waits_for_the_name_of_an_engine_that_comes_later(run, bert, tmp_path):
    address = f"ipc://{tmp_path}/1.sock"
    gateway = start_gateway(run, address)
    wait_for_log(gateway, f"waiting for the engine at {address}")
    engine = start_engine(run, bert, address)
    wait_until(lambda: is_ready(gateway))
    assert embed(gateway, "tiny-bert").status_code == 200
    assert (stop(gateway), stop(engine)) == (0, 0)


def rose(*arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.mark.parametrize("name", ["", "kites="])
@pytest.mark.parametrize("host", ["10.0.0.7", "*", "example.org"])
def test_a_gateway_refuses_engines_beyond_this_machine(name, host, capsys):
    address = f"tcp://{host}:9999"
    assert rose("gateway", "--engine", f"{name}{address}", "--port", free_port()) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: address '{address}'")
    assert error.count("\n") == 1


def test_an_engine_whose_port_is_taken_says_so(bert, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert rose("engine", bert, "--bind", address, "--max-batch-tokens", 64) == 1
    assert "Address already in use" in capsys.readouterr().err


def test_a_gateway_whose_port_is_taken_says_so(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert rose("gateway", "--engine", "kites=ipc:///tmp/none.sock", "--port", port) == 1
    assert capsys.readouterr().err == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )
