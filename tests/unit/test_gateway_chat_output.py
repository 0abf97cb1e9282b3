"""POST /v1/chat/completions, not streamed: text, log-probabilities, tool calls, failures."""

import json
import math

import msgspec
import pytest

from rose.serving.client_api import EngineError
from rose.serving.gateway.sampling_fields import ANY_OBJECT
from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import (
    BOS,
    END,
    TOOL_TEMPLATE,
    StubLLM,
    answer,
    byte_tokenizer,
    chat,
    http_of,
    prompt_of,
    sampling_of,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def backend():
    return byte_tokenizer()


@pytest.fixture
def http(backend):
    return http_of(StubLLM(backend=backend).say("Good day to you."))


# Stops and text


def test_stop_strings(http):
    for stop in ("day", ["zzz", "day"]):
        choice = answer(http, stop=stop)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Good ", "stop")
    choice = answer(http, stop="day", include_stop_str_in_output=True)["choices"][0]
    assert choice["message"]["content"] == "Good day"
    assert answer(http, stop=[])["choices"][0]["message"]["content"] == "Good day to you."


def test_a_stop_string_ends_the_work(http):
    http.client.per_delta = 1
    usage = answer(http, stop="Good")["usage"]
    assert http.client.cancelled == 1
    assert http.client.running == 0
    assert usage["completion_tokens"] == http.client.delivered == 4


def test_min_tokens_hides_stops(http):
    choice = answer(http, stop=["o"], min_tokens=6)["choices"][0]
    assert choice["message"]["content"] == "Good day t"


def test_stop_token_has_no_text_unless_asked_for(http):
    (token,) = http.client.backend.encode("y").ids
    choice = answer(http, stop_token_ids=[token])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Good da", "stop")
    fields = {"stop_token_ids": [token], "include_stop_str_in_output": True}
    assert answer(http, **fields)["choices"][0]["message"]["content"] == "Good day"


def test_special_tokens_are_left_out(http):
    http.client.script = [65 + 6, BOS, 66 + 6, END]
    hidden = answer(http)["choices"][0]["message"]["content"]
    shown = answer(http, skip_special_tokens=False)["choices"][0]["message"]["content"]
    assert "<|bos|>" not in hidden
    assert shown.replace("<|bos|>", "") == hidden


def test_split_characters(http):
    http.client.say("🦙🧪 日本 café")
    assert answer(http)["choices"][0]["message"]["content"] == "🦙🧪 日本 café"
    http.client.script = http.client.backend.encode("🧪").ids[:-1]  # not all of its bytes
    assert answer(http)["choices"][0]["message"]["content"].endswith("\N{REPLACEMENT CHARACTER}")


# Log-probabilities


def test_logprobs(http):
    http.client.say("é!")
    body = answer(http, logprobs=True, top_logprobs=20)
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]) == "é!".encode()
    assert all(len(entry["top_logprobs"]) == 20 for entry in entries)
    assert set(entries[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert set(entries[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    entries = answer(http, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert entries[0]["top_logprobs"] == []
    assert answer(http, logprobs=False)["choices"][0]["logprobs"] is None
    assert sampling_of(http).logprobs is None


def test_impossible_tokens_have_a_floor(http):
    http.client.logprob_of = lambda _: -math.inf
    entry = answer(http, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_other_numbers_that_are_not_finite_are_errors(http, value):
    http.client.logprob_of = lambda _: value
    assert error_of(chat(http, logprobs=True), 500)["code"] == "non_finite"
    assert http.client.running == 0


# Structured output and tools


def test_response_format(http):
    answer(http, response_format={"type": "json_object"})
    assert sampling_of(http).grammar == ANY_OBJECT
    for schema in ({}, True):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer(http, response_format=form)
        assert json.loads(sampling_of(http).grammar) == schema
    schema = {"type": "object", "properties": {"z": {}, "a": {"const": "é"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer(http, response_format=form)
    assert json.loads(sampling_of(http).grammar) == schema
    assert sampling_of(http).grammar.index('"z"') < sampling_of(http).grammar.index('"a"')


def test_a_schema_beside_any_object_is_not_left_out_in_silence(http):
    form = {"type": "json_object", "schema": {"type": "object", "required": ["a"]}}
    assert error_of(chat(http, response_format=form))["param"] == "response_format.schema"
    answer(http, response_format={"type": "json_object", "schema": None})


def test_no_structured_output(backend):
    http = http_of(StubLLM([END], backend, generation={"structured_output": False}))
    schema = {"type": "json_schema", "json_schema": {"schema": {}}}
    for form in ({"type": "json_object"}, schema):
        assert error_of(chat(http, response_format=form))["param"] == "response_format"
    assert chat(http, response_format={"type": "text"}).status_code == 200


@pytest.fixture
def agent(backend):
    return http_of(
        StubLLM(
            backend=backend,
            tokenizer={"chat_templates": {"tool_use": TOOL_TEMPLATE, "default": "x"}},
        )
    )


def test_tools_are_shown_and_calls_found(agent):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslø"}}\n</tool_call>'
    agent.client.say(f"Let me see.\n{call}\n{call}")
    body = answer(agent, tools=[WEATHER])
    assert prompt_of(agent) == f"[{json.dumps(WEATHER)}]hi"
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert len({call.pop("id") for call in calls}) == 2
    function = {"name": "weather", "arguments": '{"city": "Oslø"}'}
    assert calls == [{"type": "function", "function": function}] * 2
    message = answer(agent, tools=[WEATHER], parallel_tool_calls=False)["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


def test_a_call_alone_has_no_content(agent):
    agent.client.say('<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
    assert answer(agent, tools=[WEATHER])["choices"][0]["message"]["content"] is None


def test_no_tools_no_calls(agent):
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    agent.client.say(text)
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = answer(agent, **fields)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]
    assert "weather" not in prompt_of(agent)


def test_a_call_that_is_cut_off_is_text(agent):
    agent.client.say('<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
    choice = answer(agent, tools=[WEATHER], max_tokens=9)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("<tool_call>")


def test_tools_need_a_template_that_shows_them(http):
    assert error_of(chat(http, tools=[WEATHER]))["param"] == "tools"
    assert chat(http, tools=[WEATHER], tool_choice="none").status_code == 200


def test_arguments_are_an_object_even_where_the_parameters_do_not_say_so(agent):
    for given, schema in [
        ({}, {"type": "object"}),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        ({"$ref": "#/$defs/p"}, {"$ref": "#/$defs/p"}),
    ]:
        tool = {"type": "function", "function": {"name": "w", "parameters": given}}
        answer(agent, tools=[tool], tool_choice="required")
        found = json.loads(sampling_of(agent).grammar)
        assert found["properties"]["arguments"] == schema


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "w2"}}])
def test_forced_calls(agent, choice):
    second = {
        "type": "function",
        "function": {
            "name": "w2",
            "parameters": {"$ref": "#/$defs/p", "$defs": {"p": {"type": "object"}}},
        },
    }
    agent.client.say('{"name": "w2", "arguments": {"a": 1}}')
    body = answer(agent, tools=[WEATHER, second], tool_choice=choice)
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "w2", "arguments": '{"a": 1}'}
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    schema = json.loads(sampling_of(agent).grammar)
    assert schema["$defs"] == {"p": {"type": "object"}}
    calls = schema.get("anyOf", [schema])
    names = [call["properties"]["name"]["const"] for call in calls]
    assert names == (["weather", "w2"] if choice == "required" else ["w2"])


def test_forced_calls_that_cannot_be(agent):
    unknown = {"type": "function", "function": {"name": "other"}}
    for choice in (unknown, {"type": "function"}, {}):
        error = error_of(chat(agent, tools=[WEATHER], tool_choice=choice))
        assert error["param"] == "tool_choice"
    form = {"type": "json_object"}
    error = error_of(chat(agent, tools=[WEATHER], response_format=form))
    assert error["param"] == "response_format"
    agent.client.card = msgspec.structs.replace(
        agent.client.card,
        generation=msgspec.structs.replace(agent.client.card.generation, structured_output=False),
    )
    error = error_of(chat(agent, tools=[WEATHER], tool_choice="required"))
    assert error["param"] == "tool_choice"


def refused_at_the_engine(http, engine_field, **fields):
    http.client.failure = EngineError("bad_request", "no", engine_field)
    errors = [error_of(chat(http, stream=stream, **fields)) for stream in (False, True)]
    assert errors[0] == errors[1]
    return errors[0]["param"]


def test_a_schema_that_cannot_be_names_the_field_that_holds_it(agent):
    second = {"type": "function", "function": {"name": "w2", "parameters": {"type": 7}}}
    named = {"type": "function", "function": {"name": "w2"}}
    for tools, choice, place in (
        ([WEATHER, second], named, "tools[1].function.parameters"),
        ([second], "required", "tools[0].function.parameters"),
        ([WEATHER, second], "required", "tools"),
    ):
        fields = {"tools": tools, "tool_choice": choice}
        assert refused_at_the_engine(agent, "response_format", **fields) == place
    form = {"response_format": {"type": "json_object"}}
    assert refused_at_the_engine(agent, "response_format", **form) == "response_format"


def test_bans_of_all_tokens_name_what_bans_them(http):
    bias = {"logit_bias": {"1": -100}}
    for fields, param in (
        ({"min_tokens": 3, "stop_token_ids": [1, 2]}, "min_tokens"),
        ({"min_tokens": 3, **bias}, "logit_bias"),
        (bias, "logit_bias"),
    ):
        assert refused_at_the_engine(http, "logit_bias", **fields) == param


@pytest.mark.parametrize(
    ("checkpoint", "fields", "param"),
    [
        ({"min_tokens": 3}, {}, "min_tokens"),
        ({"min_tokens": 3}, {"min_tokens": 0}, "logit_bias"),
        ({"min_tokens": 3}, {"logit_bias": {"1": -100}}, "logit_bias"),
        ({"logit_bias": {1: -100.0}}, {}, "logit_bias"),
        ({"logit_bias": {1: -100.0}}, {"min_tokens": 3}, "min_tokens"),
        ({"logit_bias": {1: -100.0}, "min_tokens": 3}, {}, "logit_bias"),
    ],
)
def test_bans_of_the_checkpoint_too_name_what_was_sent_or_can_be(
    backend, checkpoint, fields, param
):
    http = http_of(StubLLM(backend=backend, generation=checkpoint))
    assert refused_at_the_engine(http, "logit_bias", **fields) == param


# Failures


@pytest.mark.parametrize(
    ("kind", "status"),
    [("bad_request", 400), ("overloaded", 429), ("unavailable", 503), ("internal", 500)],
)
@pytest.mark.parametrize("after", [0, 3])
def test_engine_failures(http, kind, status, after):
    http.client.failure, http.client.fail_after = EngineError(kind, "because", "seed"), after
    error = error_of(chat(http, n=3), status)
    assert (error["message"], error["code"], error["param"]) == ("because", kind, "seed")
    assert http.client.running == 0


def test_a_model_that_cannot_generate(backend):
    client = StubLLM([END], backend, tasks=("embed",))
    assert error_of(chat(http_of(client)))["param"] == "model"
    client = StubLLM([END], backend)
    client.ready = False
    error_of(chat(http_of(client)), 503)


def test_deadline(backend):
    client = StubLLM([65] * 50, backend)
    client.delay_s = 0.05
    http = http_of(client, request_timeout_s=0.2)
    assert error_of(chat(http), 504)["code"] == "deadline"
    assert client.running == 0
    assert client.cancelled == 1


def test_metrics(http):
    answer(http, n=2)
    lines = http.get("/metrics").text.splitlines()
    tokens = 2 * len(http.client.script)
    assert f'rose_generated_tokens_total{{model="llm"}} {tokens}.0' in lines
    assert 'rose_time_to_first_token_seconds_count{model="llm"} 2.0' in lines
    assert 'rose_time_per_output_token_seconds_count{model="llm"} 2.0' in lines
