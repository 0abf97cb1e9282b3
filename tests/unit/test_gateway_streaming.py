"""Streams of chat completions and completions: their grammar, their text, and their ends."""

import json
from itertools import groupby

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.serving.client_api import EngineError
from rose.serving.gateway.generation_schemas import ChatChunk, CompletionAnswer
from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import (
    TOOL_TEMPLATE,
    StubLLM,
    byte_tokenizer,
    events_of,
    http_of,
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
