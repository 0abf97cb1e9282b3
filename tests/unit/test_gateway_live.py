"""The gateway behind a real server and real sockets: disconnects, waiting, stock clients."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import numpy as np
import openai
import pytest
import uvicorn

from rose.serving.gateway import http_protocol
from rose.serving.gateway.app import create_app
from rose.serving.gateway.http_protocol import NO_HTTP, HttpProtocol
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.repeated import RepeatedWarning
from tests.unit.gateway_stub import StubClient, card, tokenizer_json, vector


class Live:
    """A server in a thread of its own."""

    def __init__(self, client, **settings):
        self.client = client
        self.app = create_app({"stub": client}, GatewaySettings(**settings))
        config = uvicorn.Config(
            self.app, http=HttpProtocol, ws="none", log_config=None, access_log=False
        )
        self.server = uvicorn.Server(config)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})

    def __enter__(self):
        self.thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(10)
        self.listener.close()

    @property
    def idle(self):
        gateway = self.app.state.gateway
        return (self.client.running, gateway.requests_in_flight, gateway.bytes_in_flight) == (
            0,
            0,
            0,
        )

    def send(self, raw):
        """Sends bytes and returns the connection."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(raw)
        return connection


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def post(body, path="/v1/embeddings", length=None):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture(scope="module")
def live():
    with Live(StubClient()) as server:
        yield server


@pytest.fixture
def slow(live):
    live.client.delay_s, live.client.cancelled = 30, 0
    yield live
    live.client.delay_s = 0
    wait_until(lambda: live.idle)


def test_a_client_that_leaves_cancels_its_request(slow):
    connection = slow.send(post(b'{"input":"a"}'))
    wait_until(lambda: slow.client.running == 1)
    assert not slow.idle
    connection.close()
    wait_until(lambda: slow.client.cancelled == 1)
    wait_until(lambda: slow.idle)
    metrics = httpx.get(f"{slow.url}/metrics").text
    assert 'rose_disconnects_total{route="/v1/embeddings"} 1.0' in metrics


def test_many_clients_that_leave(slow):
    connections = [slow.send(post(b'{"input":["a","red"]}')) for _ in range(20)]
    wait_until(lambda: slow.client.running == 20)
    for connection in connections:
        connection.close()
    wait_until(lambda: slow.client.cancelled == 20)


def test_a_client_that_leaves_amid_its_body(live):
    calls = len(live.client.calls)
    connection = live.send(post(b'{"input":', length=100))
    wait_until(lambda: live.app.state.gateway.bytes_in_flight > 0)
    connection.close()
    wait_until(lambda: live.idle)
    assert len(live.client.calls) == calls
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_a_body_longer_than_announced(live):
    with live.send(post(b'{"input":"a"}', length=5)) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_body_shorter_than_announced():
    with (
        Live(StubClient(), body_timeout_s=0.1) as server,
        server.send(post(b'{"input":"a"}', length=50)) as connection,
    ):
        answer = connection.recv(1000)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"did not arrive" in answer


def test_bodies_that_do_not_come_keep_nobody_out():
    with Live(StubClient(), max_concurrent_requests=4) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(server.send(post(b'{"input":', length=100)))
        wait_until(lambda: server.app.state.gateway.bytes_in_flight == 20 * len(b'{"input":'))
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code == 200


def test_neither_nonsense_nor_upgrades_fill_the_log(live, caplog, monkeypatch):
    monkeypatch.setattr(http_protocol, "_no_http", RepeatedWarning(http_protocol.log, NO_HTTP))
    for _ in range(50):
        with live.send(b"nonsense\r\n\r\n") as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    with live.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == [NO_HTTP % "127.0.0.1"]


def test_too_large_is_said_before_the_body_is_sent():
    with Live(StubClient(), max_body_bytes=1000) as server:
        with server.send(post(b"", length=10_000_000)) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        with server.send(
            b"POST /embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"3e8\r\n"
            + b" " * 1000
            + b"\r\n1\r\n{\r\n"
        ) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_connections_are_kept_after_errors(live):
    with httpx.Client(base_url=live.url) as client:
        for body, status in (
            (b"{", 400),
            (b'{"input":"a"}', 200),
            (b'{"input":[]}', 400),
            (b'{"input":"a"}', 200),
        ):
            response = client.post(
                "/v1/embeddings", content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == status


def test_the_stock_client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="stub", input=["a red", "kite"])
        assert answer.usage.prompt_tokens == 7
        np.testing.assert_allclose(answer.data[0].embedding, vector([2, 5, 6, 3], 16), atol=1e-7)
        ids = client.embeddings.create(
            model="stub", input=[[2, 5, 6, 3]], encoding_format="float", dimensions=8
        )
        assert len(ids.data[0].embedding) == 8
        assert [model.id for model in client.models.list()] == ["stub"]
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="stub", input=[])
        assert (caught.value.param, caught.value.type) == ("input", "invalid_request_error")
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")


async def longest_gap(url, work):
    """Seconds that /health took at most while `work` was under way."""
    gaps = []
    async with httpx.AsyncClient(base_url=url) as client:
        await client.get("/health")
        task = asyncio.create_task(work)
        while not task.done():
            started = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            gaps.append(time.perf_counter() - started)
            await asyncio.sleep(0.01)
    assert len(gaps) > 3
    return max(gaps), await task


def answers_of(live, body, times=1):
    """Answers to a large request, in one of at most eight tries without a late /health.

    One answer may be late for reasons of the machine; a loop that is blocked is so every time.
    """
    gaps = []
    while not gaps or gaps[-1] > 0.1:
        assert len(gaps) < 8, f"/health took up to {gaps} seconds"
        gap, response = asyncio.run(longest_gap(live.url, several(live, body, times)))
        gaps.append(gap)
    return response


def blocking(live, body):
    """Sends from a thread, so that writing the body does not slow the one that watches."""
    return asyncio.to_thread(httpx.post, f"{live.url}/v1/embeddings", content=body, timeout=60,
                             headers={"content-type": "application/json"})  # fmt: skip


@pytest.fixture(scope="module")
def roomy():
    """A model that takes so many tokens that a megabyte is tokenised whole."""
    with Live(StubClient(card(max_model_len=1 << 20), tokenizer_json())) as server:
        yield server


@pytest.mark.alone
@pytest.mark.parametrize("text", ["red kite over ", "word " * 3 + "xé "])
def test_health_answers_while_a_megabyte_is_tokenised(roomy, text):
    body = json.dumps(
        {"input": text * (1_000_000 // len(text)), "dimensions": 2}, ensure_ascii=False
    ).encode()
    response = answers_of(roomy, body)
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] > 100_000


@pytest.mark.alone
@pytest.mark.parametrize("truncate", [False, True])
def test_health_answers_while_twenty_megabytes_are_refused_or_cut(live, truncate):
    chars = 2_000_000 if truncate else 20_000_000
    body = json.dumps({"input": "word " * (chars // 5), "truncate": truncate}).encode()
    response = answers_of(live, body, 1 if truncate else 5)
    assert response.status_code == (200 if truncate else 400)


async def several(live, body, times):
    for _ in range(times):
        response = await blocking(live, body)
    return response


@pytest.mark.alone
def test_small_requests_pass_large_ones(live):
    body = json.dumps({"input": "word " * 600_000, "truncate": True}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(live.send(post(body)))
        wait_until(lambda: live.app.state.gateway.requests_in_flight == 3)
        started = time.perf_counter()
        assert httpx.post(f"{live.url}/v1/embeddings", json={"input": "a red"}).status_code == 200
        assert time.perf_counter() - started < 1.0
        assert not live.idle
    wait_until(lambda: live.idle, 20)


def test_many_at_one_time(live):
    async def run():
        async with httpx.AsyncClient(base_url=live.url) as client:
            texts = [f"red {'kite ' * (i % 20)}" for i in range(100)]
            sent = (client.post("/v1/embeddings", json={"input": text}) for text in texts)
            answers = await asyncio.gather(*sent)
        for text, answer in zip(texts, answers, strict=True):
            expected = vector([2, 6] + [7] * text.count("kite") + [3], 16)
            np.testing.assert_allclose(answer.json()["data"][0]["embedding"], expected, atol=1e-6)

    asyncio.run(run())
