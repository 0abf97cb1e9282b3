"""Generation over HTTP through real sockets: the stock client, clients that leave or are slow."""

import asyncio
import json
import socket
import threading
import time

import httpx
import msgspec
import openai
import pytest

from rose.serving.client_api import EngineError
from rose.serving.gateway.app import create_app
from rose.serving.gateway.settings import GatewaySettings
from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import END, HI, StubLLM, byte_tokenizer, served, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "hi"}}
TEXT = "Good day 🦙🧪 日本, said\u2028the café."
BACKEND = byte_tokenizer()
both = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def body_of(path, **fields):
    return {**PROMPTS[path], "max_tokens": 200, **fields}


@pytest.fixture(scope="module")
def server():
    client = StubLLM(backend=BACKEND)
    with served(client) as url:
        yield client, url


@pytest.fixture
def llm(server):
    client, url = server
    client.__init__(backend=BACKEND)
    client.say(TEXT)
    yield client, url
    wait_for(lambda: not client.running)


def openai_client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_openai_client(llm):
    stub, url = llm
    messages = HI
    with openai_client(url) as client:
        answer = client.chat.completions.create(model="llm", messages=messages)
        assert answer.choices[0].message.content == TEXT
        answer = client.completions.create(model="llm", prompt=["a", "b"], max_tokens=100)
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        options = {"include_usage": True}
        chunks = list(
            client.chat.completions.create(
                model="llm", messages=messages, stream=True, stream_options=options
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        content = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        assert "".join(content) == TEXT
        assert chunks[-1].usage.completion_tokens == len(stub.script)
        chunks = client.completions.create(model="llm", prompt="a", stream=True, max_tokens=100)
        assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


def test_openai_client_raises(llm):
    stub, url = llm
    stub.failure, stub.fail_after = EngineError("internal", "the engine died"), 6
    fields = {"model": "llm", "messages": HI, "stream": True}
    with openai_client(url) as client:
        chunks = client.chat.completions.create(**fields)
        got = []
        with pytest.raises(openai.APIError, match="the engine died"):
            got.extend(chunks)
        assert len(got) >= 2
        stub.fail_after = 0
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(**fields)
        stub.failure = EngineError("overloaded", "full")
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**fields)


def raw_post(url, path, body):
    """A connection on which a request has been sent."""
    content = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@both
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("delay_s", [0.01, 60.0])
def test_a_client_that_leaves_cancels_its_choices(llm, path, streams, delay_s):
    """At once, whether a token has come or not."""
    stub, url = llm
    stub.script, stub.delay_s = [70] * 200, delay_s
    connection = raw_post(url, path, body_of(path, stream=streams, n=3))
    wait_for(lambda: stub.running == 3 and (delay_s > 1 or stub.delivered > 6))
    connection.close()
    wait_for(lambda: stub.cancelled == 3 and not stub.running, seconds=2)


def test_a_slow_reader_holds_nobody_up_and_gets_fewer_chunks(llm):
    stub, url = llm
    stub.card = msgspec.structs.replace(stub.card, max_model_len=10**6)
    stub.card = msgspec.structs.replace(
        stub.card, generation=msgspec.structs.replace(stub.card.generation, max_kv_tokens=0)
    )
    count = 50_000
    stub.script = [70] * count
    with raw_post(url, CHAT, body_of(CHAT, stream=True, max_tokens=count)) as connection:
        wait_for(lambda: stub.delivered == count, seconds=20)
        assert not stub.running
        received = b""
        while b"[DONE]" not in received:
            part = connection.recv(1 << 20)
            assert part
            received += part
    chunks = received.count(b"data: ")
    assert chunks < count // 2
    content = b"".join(part.split(b'"')[0] for part in received.split(b'"content":"')[1:])
    assert len(content) == count


def test_streams_count_as_requests_being_served():
    client = StubLLM([70] * 100, BACKEND)
    client.delay_s = 0.01
    with served(client, max_concurrent_requests=1) as url:
        with raw_post(url, CHAT, body_of(CHAT, stream=True)):
            wait_for(lambda: client.delivered > 3)
            assert httpx.post(url + CHAT, json=body_of(CHAT)).status_code == 429
        wait_for(lambda: not client.running)
        client.script = [70, END]
        assert httpx.post(url + CHAT, json=body_of(CHAT)).status_code == 200


@pytest.mark.alone
def test_health_while_a_huge_prompt_is_read(llm):
    _, url = llm
    huge = {"messages": [{"role": "user", "content": "lorem ipsum " * 2_000_000}]}
    answers = []
    post = threading.Thread(
        target=lambda: answers.append(httpx.post(url + CHAT, json=huge, timeout=60))
    )
    post.start()
    slowest = 0.0
    with httpx.Client() as client:
        while post.is_alive():
            started = time.perf_counter()
            assert client.get(f"{url}/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - started)
            time.sleep(0.01)
    error = error_of(answers[0])
    assert error["code"] == "context_length_exceeded"
    assert slowest < 0.5


def test_log_of_disconnects():
    """A client that leaves is counted as such."""
    client = StubLLM(backend=BACKEND).say(TEXT)
    client.delay_s = 0.01

    async def leave():
        app = create_app({"llm": client}, GatewaySettings())
        left = asyncio.Event()
        body = json.dumps(body_of(CHAT, stream=True)).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            left.set()

        scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode()}
        scope |= {"headers": [], "query_string": b"", "http_version": "1.1", "root_path": ""}
        await app(scope, receive, send)
        return app.state.gateway

    gateway = asyncio.run(leave())
    assert f'rose_disconnects_total{{route="{CHAT}"}} 1.0' in gateway.metrics.exposition().decode()
    assert gateway.requests_in_flight == 0
    assert (client.running, client.cancelled) == (0, 1)
