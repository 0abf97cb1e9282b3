"""The gateway's process against engines that are there, not there yet, or faulty."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from rose.serving.client import EngineClient
from rose.serving.gateway import server
from rose.serving.gateway.app import create_app
from rose.serving.gateway.server import parse_engine
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.process import listen
from rose.serving.transport import AddressError
from tests.ports import free_port
from tests.unit.engine_rig import drive
from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import StubLLM


@pytest.fixture
def gateway(tmp_path):
    """Starts `rose gateway` with options; returns its process and its url."""
    started = []

    def start(*options):
        port = free_port()
        command = [sys.executable, "-m", "rose", "gateway", "--port", str(port), *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process, f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_line(process, words):
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"the gateway never said {words!r}")


@pytest.mark.parametrize("name", ["toy=", ""])
def test_an_engine_may_come_later(gateway, tmp_path, name):
    process, url = gateway("--engine", f"{name}ipc://{tmp_path}/none.sock")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/ready", timeout=5)
            break
        except httpx.TransportError:
            time.sleep(0.05)
    assert answer.status_code == 503
    assert "connecting to the engine" in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/health").status_code == 200
    for body in ({"input": "a"}, {"input": "a", "model": "toy"}):
        answer = httpx.post(f"{url}/v1/embeddings", json=body)
        assert "connecting to the engine" in error_of(answer, 503)["message"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.1:5", "a=tcp://10.0.0.1:5", "tcp://127.0.0.1:*", "x"]
)
def test_an_address_that_cannot_be_is_one_line_and_exit_code_1(gateway, address):
    process, _ = gateway("--engine", address)
    assert process.wait(30) == 1
    (line,) = process.stderr.read().splitlines()
    assert line.startswith("error: address")


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", "", True), ("0.0.0.0", "k", False), ("127.0.0.1", "", False)],
)
def test_an_open_door_is_pointed_out(gateway, tmp_path, host, key, warned):
    options = ["--api-key", key] if key else []
    process, _ = gateway("--engine", f"ipc://{tmp_path}/none.sock", "--host", host, *options)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "waiting for the engine" in line:
            break
    assert any("everybody who can reach port" in line for line in lines) == warned


def test_a_name_may_be_given_and_a_path_may_hold_an_equals_sign():
    assert parse_engine("m=ipc:///tmp/e.sock") == ("m", "ipc:///tmp/e.sock")
    assert parse_engine("ipc:///tmp/a=b.sock") == (None, "ipc:///tmp/a=b.sock")
    assert parse_engine("m=ipc:///tmp/a=b.sock") == ("m", "ipc:///tmp/a=b.sock")
    assert parse_engine("m=1=tcp://127.0.0.1:5") == ("m=1", "tcp://127.0.0.1:5")
    with pytest.raises(AddressError):
        parse_engine("m=nonsense")


def test_what_the_drain_cuts_off_is_told_so(monkeypatch, caplog):
    monkeypatch.setattr(server, "DRAIN_LIMIT_S", 1)
    llm = StubLLM([70] * 100)
    llm.delay_s = 60
    first = StubLLM([70] * 100)
    first.delay_s = 0.3
    small = {"prompt": "hi", "max_tokens": 100}

    async def scenario():
        stop = asyncio.Event()
        app = create_app({"llm": llm, "first": first})
        with listen("127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
            serving = asyncio.create_task(
                server._serve_http(app, server.Door(listener=listener), stop)
            )
            async with httpx.AsyncClient(timeout=20) as client:
                bodies = [
                    {**small, "model": "llm"},
                    {**small, "model": "llm", "stream": True},
                    {**small, "model": "first", "stream": True},
                ]
                sent = [asyncio.create_task(client.post(url, json=body)) for body in bodies]
                while llm.running < 2 or not first.delivered:
                    await asyncio.sleep(0.01)
                stop.set()
                answers = await asyncio.gather(*sent)
            await serving
        return answers

    *refused, begun = asyncio.run(asyncio.wait_for(scenario(), 30))
    for answer in refused:
        assert error_of(answer, 503)["message"] == "The server is shutting down."
    assert begun.status_code == 200
    last = json.loads(begun.text.strip().split("data: ")[-1])
    assert last["error"]["message"] == "The server is shutting down."
    assert llm.running == first.running == 0
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_fails_ends_the_gateway_with_its_error(tmp_path, monkeypatch):
    async def broken(self):
        raise KeyError("a fault of ROSE")

    monkeypatch.setattr(EngineClient, "_heartbeat_loop", broken)

    async def scenario():
        engines = [("toy", f"ipc://{tmp_path}/none.sock")]
        with listen("127.0.0.1", 0) as listener, pytest.raises(KeyError, match="a fault of ROSE"):
            await server._serve(engines, GatewaySettings(), server.Door(listener=listener), None)

    drive(scenario)
    assert os.listdir(tmp_path) == []
