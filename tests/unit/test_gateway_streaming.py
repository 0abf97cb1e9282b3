"""Streams of chat completions and completions: their grammar, their text, and their ends."""

import asyncio
import json
import socket
import threading
import time
from itertools import groupby

import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.serving.client_api import EngineError
from rose.serving.gateway.app import create_app
from rose.serving.gateway.generation_schemas import ChatChunk, CompletionAnswer
from rose.serving.gateway.settings import GatewaySettings
from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import (
    END,
    TOOL_TEMPLATE,
    StubLLM,
    byte_tokenizer,
    events_of,
    http_of,
    served,
    wait_for,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "hi"}}
TYPES = {CHAT: ChatChunk, COMPLETIONS: CompletionAnswer}
TEXT = "Good day 🦙🧪 日本, said\u2028the café."
BACKEND = byte_tokenizer()
both = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@pytest.fixture
def http():
    return http_of(StubLLM(backend=BACKEND).say(TEXT))


def body_of(path, **fields):
    return {**PROMPTS[path], "max_tokens": 200, **fields}


def whole(http, path, **fields):
    response = http.post(path, body_of(path, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def stream(http, path, **fields):
    """The chunks of a stream that ends well."""
    response = http.post(path, body_of(path, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    for event in events:
        msgspec.json.decode(event, type=TYPES[path])
    return [json.loads(event, parse_constant=pytest.fail) for event in events]


def parts_of(chunks, index):
    """What the chunks have of one choice."""
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def text_of(parts):
    return "".join(
        part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts
    )


def text_of_whole(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


# The grammar


@both
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("per_delta", [1, 4, 100])
def test_grammar(http, path, n, per_delta):
    http.client.per_delta = per_delta
    chunks = stream(http, path, n=n)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    for index in range(n):
        parts = parts_of(chunks, index)
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + ["stop"]
        assert text_of(parts) == TEXT
        if path == CHAT:
            first, *middle, last = [part["delta"] for part in parts]
            assert first == {"role": "assistant", "content": ""}
            assert all(set(delta) == {"content"} and delta["content"] for delta in middle)
            assert last == {}


@both
def test_usage(http, path):
    http.client.cached = 1
    expected = whole(http, path, n=2)["usage"]
    *chunks, last = stream(http, path, n=2, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == expected
    assert last["id"] == chunks[0]["id"]
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        assert all("usage" not in chunk for chunk in stream(http, path, stream_options=options))


@both
def test_several_prompts_and_lengths(http, path):
    prompt = {"prompt": ["a", "b"]} if path == COMPLETIONS else {}
    chunks = stream(http, path, n=2, max_tokens=3, **prompt)
    for choice in whole(http, path, n=2, max_tokens=3, **prompt)["choices"]:
        parts = parts_of(chunks, choice["index"])
        assert text_of(parts) == text_of_whole(choice)
        assert parts[-1]["finish_reason"] == "length"


@both
@pytest.mark.parametrize("per_delta", [1, 3])
def test_logprobs(http, path, per_delta):
    http.client.per_delta = per_delta
    fields = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    fields |= {} if path == CHAT else {"echo": True}
    expected = whole(http, path, stop="said", **fields)["choices"][0]["logprobs"]
    chunks = stream(http, path, stop="said", **fields)
    given_parts = [part["logprobs"] for part in parts_of(chunks, 0) if part["logprobs"]]
    for name, values in expected.items():
        if values is not None:
            assert [value for part in given_parts for value in part[name]] == values


def test_echo(http):
    chunks = stream(http, COMPLETIONS, prompt=["ab", "c"], n=2, echo=True, max_tokens=4)
    for index, prompt in enumerate(["ab", "ab", "c", "c"]):
        assert text_of(parts_of(chunks, index)) == prompt + "Good"
    chunks = stream(http, COMPLETIONS, echo=True, max_tokens=0)
    assert text_of(parts_of(chunks, 0)) == "hi"


def test_tool_calls():
    facts = {"chat_templates": {"default": TOOL_TEMPLATE}}
    http = http_of(StubLLM(backend=BACKEND, tokenizer=facts))
    call = '<tool_call>\n{"name": "w", "arguments": {"city": "Oslø"}}\n</tool_call>'
    http.client.say(f"I see < one.\n{call}\n{call}")
    tools = [{"type": "function", "function": {"name": "w"}}]
    parts = parts_of(stream(http, CHAT, tools=tools), 0)
    assert text_of(parts) == "I see < one."
    calls = [part["delta"]["tool_calls"][0] for part in parts if "tool_calls" in part["delta"]]
    for number, (_, pieces) in enumerate(groupby(calls, key=lambda call: call["index"])):
        first, *rest = pieces
        assert first["id"].startswith("call_")
        assert (first["index"], first["type"], first["function"]["name"]) == (
            number,
            "function",
            "w",
        )
        assert all("id" not in piece and "name" not in piece["function"] for piece in rest)
        written = "".join(piece["function"]["arguments"] for piece in (first, *rest))
        assert json.loads(written) == {"city": "Oslø"}
    assert calls[-1]["index"] == 1
    assert parts[-1]["finish_reason"] == "tool_calls"


# Text


@both
def test_no_split_characters(http, path):
    http.client.per_delta = 1
    for part in parts_of(stream(http, path), 0):
        assert "\N{REPLACEMENT CHARACTER}" not in text_of([part])
    http.client.script = BACKEND.encode("a🧪").ids[:-1]
    parts = parts_of(stream(http, path), 0)
    assert text_of(parts) == BACKEND.decode(http.client.script)
    assert text_of(parts).count("\N{REPLACEMENT CHARACTER}") == 1


@both
def test_stop_strings_at_every_place(path):
    """No character of a stop string is sent, however it lies in the tokens."""
    text = "abcabcab🦙é"
    http = http_of(StubLLM(backend=BACKEND).say(text))
    stops = {text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for number, stop in enumerate(sorted(stops)):
        http.client.per_delta = 1 + number % 3
        parts = parts_of(stream(http, path, stop=stop), 0)
        assert text_of(parts) == text[: text.find(stop)]
        assert parts[-1]["finish_reason"] == "stop"


SCRIPTS = st.lists(st.integers(0, 319), max_size=24)
STOPS = st.lists(st.text("abc é🦙o", min_size=1, max_size=4), max_size=3)
FUZZED = http_of(StubLLM(backend=BACKEND))


@settings(max_examples=120, deadline=None)
@given(
    SCRIPTS,
    STOPS,
    st.integers(1, 5),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([CHAT, COMPLETIONS]),
)
def test_a_stream_is_the_whole(script, stops, per_delta, min_tokens, include, skip, path):
    client = FUZZED.client
    fields = {"stop": stops, "min_tokens": min_tokens, "include_stop_str_in_output": include}
    fields |= {"skip_special_tokens": skip, "ignore_eos": True}
    client.script, client.per_delta = script, 1
    expected = whole(FUZZED, path, **fields)
    client.per_delta = per_delta
    *chunks, last = stream(FUZZED, path, stream_options={"include_usage": True}, **fields)
    parts = parts_of(chunks, 0)
    assert text_of(parts) == text_of_whole(expected["choices"][0])
    assert parts[-1]["finish_reason"] == expected["choices"][0]["finish_reason"]
    assert last["usage"] == expected["usage"]


# Failures


@both
@pytest.mark.parametrize("kind", ["overloaded", "bad_request", "internal", "unavailable"])
def test_failure_before_the_first_chunk_has_its_status(http, path, kind):
    http.client.failure = EngineError(kind, "because")
    status = {"overloaded": 429, "bad_request": 400, "internal": 500, "unavailable": 503}[kind]
    error = error_of(http.post(path, body_of(path, stream=True)), status)
    assert (error["code"], error["message"]) == (kind, "because")


def test_mistakes_have_their_status(http):
    error_of(http.post(CHAT, body_of(CHAT, stream=True, n=0)))
    error_of(http.post(COMPLETIONS, body_of(COMPLETIONS, stream=True, prompt="")))


@both
def test_failure_on_the_way_is_the_last_event(http, path):
    http.client.failure, http.client.fail_after = EngineError("internal", "böse"), 5
    response = http.post(path, body_of(path, stream=True, n=2))
    assert response.status_code == 200
    *events, last = events_of(response.text)
    assert json.loads(last) == {
        "error": {
            "message": "böse",
            "type": "server_error",
            "param": None,
            "code": "internal",
        }
    }
    chunks = [json.loads(event) for event in events]
    assert all(part["finish_reason"] is None for chunk in chunks for part in chunk["choices"])
    assert text_of(parts_of(chunks, 0))
    assert http.client.running == 0


@both
def test_deadline(path):
    client = StubLLM([70] * 100, BACKEND)
    client.delay_s = 0.02
    http = http_of(client, request_timeout_s=0.3)
    *chunks, last = events_of(http.post(path, body_of(path, stream=True)).text)
    assert chunks
    assert json.loads(last)["error"]["code"] == "deadline"
    client.delay_s = 1.0
    error_of(http.post(path, body_of(path, stream=True)), 504)
    assert client.running == 0


def test_a_number_that_is_not_finite(http):
    http.client.logprob_of = lambda token: float("nan") if token == http.client.script[3] else -1
    *_, last = events_of(http.post(CHAT, body_of(CHAT, stream=True, logprobs=True)).text)
    assert json.loads(last)["error"]["code"] == "non_finite"


# Over a socket


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
    messages = PROMPTS[CHAT]["messages"]
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
    fields = {"model": "llm", "messages": PROMPTS[CHAT]["messages"], "stream": True}
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


def test_log_of_disconnects(http):
    """A client that leaves is counted as such."""

    async def leave():
        app = create_app({"llm": http.client}, GatewaySettings())
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
        http.client.delay_s = 0.01
        await app(scope, receive, send)
        return app.state.gateway

    gateway = asyncio.run(leave())
    assert f'rose_disconnects_total{{route="{CHAT}"}} 1.0' in gateway.metrics.exposition().decode()
    assert gateway.requests_in_flight == 0
    assert (http.client.running, http.client.cancelled) == (0, 1)
