"""POST /v1/chat/completions, not streamed: fields, prompts, answers; against a stub engine."""

import json
import math
from pathlib import Path

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.serving.client_api import EngineError
from rose.serving.gateway.generation_schemas import ChatAnswer, ChatRequest, CompletionRequest
from rose.serving.gateway.routes import OPERATIONS
from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import (
    BOS,
    END,
    TOOL_TEMPLATE,
    VOCAB_SIZE,
    StubLLM,
    byte_tokenizer,
    http_of,
)

HI = [{"role": "user", "content": "hi"}]
SMOLLM = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct"
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


def chat(http, messages=HI, **fields):
    return http.post("/v1/chat/completions", {"messages": messages, **fields})


def answer(http, messages=HI, **fields):
    response = chat(http, messages, **fields)
    assert response.status_code == 200, response.text
    assert response.content.isascii()
    msgspec.json.decode(response.content, type=ChatAnswer)
    return json.loads(response.content, parse_constant=pytest.fail)


def sampling(http, call=-1):
    return http.client.calls[call][1]


def prompt(http, call=-1):
    return http.client.backend.decode(http.client.calls[call][0], skip_special_tokens=False)


# The answer


def test_shape(http):
    http.client.cached = 3
    body = answer(http)
    usage = body.pop("usage")
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    message = {"role": "assistant", "content": "Good day to you.", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "model": "llm",
        "system_fingerprint": "llm-1",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
    }
    tokens, generated = len(http.client.calls[0][0]), len(http.client.script)
    assert usage == {
        "prompt_tokens": tokens,
        "completion_tokens": generated,
        "total_tokens": tokens + generated,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_alias_and_one_model_needs_no_name(http):
    assert http.post("/chat/completions", {"messages": HI}).status_code == 200
    assert chat(http, model="llm").status_code == 200
    assert error_of(chat(http, model="other"), 404)["param"] == "model"


def test_engine_gets_request_id_and_priority(http):
    chat(http, priority="bulk", request_id="abc")
    assert http.client.calls[-1][2:] == ("bulk", "abc")


def test_choices_have_seeds_of_their_own(http):
    body = answer(http, n=3, seed=(1 << 63) - 2, temperature=1.0)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    seeds = sorted(call[1].seed for call in http.client.calls)
    assert seeds == [-(1 << 63), (1 << 63) - 2, (1 << 63) - 1]
    assert body["usage"]["prompt_tokens"] == len(http.client.calls[0][0])
    assert body["usage"]["completion_tokens"] == 3 * len(http.client.script)


def test_greedy_choices_are_equal(http):
    body = answer(http, n=4, temperature=0)
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Good day to you."}


def test_examples_work(http):
    operations = [operation for operation in OPERATIONS if operation.tag == "Text generation"]
    assert len(operations) == 2
    for operation in operations:
        response = http.post(operation.path, operation.example)
        msgspec.json.decode(response.content, type=operation.answer)


def test_schemas_frozen():
    """Fields of a request are an interface: these lists change only on purpose."""
    common = (
        "add_special_tokens bad_words cache_salt frequency_penalty guided_choice guided_grammar "
        "guided_json guided_regex ignore_eos include_stop_str_in_output logit_bias logits_processors "
        "logprobs max_completion_tokens max_tokens min_p min_tokens model n presence_penalty priority "
        "prompt_logprobs repetition_penalty request_id response_format seed skip_special_tokens stop "
        "stop_token_ids stream stream_options structured_outputs temperature top_k top_p "
        "truncate_prompt_tokens use_beam_search user"
    )
    chat_fields = (
        "add_generation_prompt audio chat_template chat_template_kwargs continue_final_message "
        "documents echo function_call functions messages modalities parallel_tool_calls "
        "reasoning_effort tool_choice tools top_logprobs web_search_options"
    )
    completion_fields = "best_of echo prompt suffix"
    for kind, own in ((ChatRequest, chat_fields), (CompletionRequest, completion_fields)):
        assert set(kind.__struct_fields__) == {*common.split(), *own.split()}


# Fields


def test_defaults(http):
    answer(http)
    found = sampling(http)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (1, 1, 0, 0)
    assert (found.seed, found.logprobs, found.grammar, found.stop_token_ids) == (
        None,
        None,
        None,
        (),
    )


def test_precedence_of_sampling_defaults(backend):
    facts = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    http = http_of(StubLLM([END], backend, generation={**facts, "repetition_penalty": 1.1}))
    answer(http)
    found = sampling(http)
    assert {name: getattr(found, name) for name in facts} == facts
    assert found.repetition_penalty == 1.1
    answer(http, temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
    found = sampling(http)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0, 0, 1, 0)
    assert found.repetition_penalty == 1


NULLS = [
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "response_format",
    "logprobs",
    "top_logprobs",
    "functions",
    "user",
    "model",
    "function_call",
    "modalities",
    "chat_template_kwargs",
    "add_generation_prompt",
    "audio",
    "documents",
    "suffix",
]


def test_null_is_absent(http):
    expected = answer(http)["choices"]
    assert answer(http, top_logprobs=0, n=1)["choices"] == expected
    assert answer(http, **dict.fromkeys(NULLS))["choices"] == expected
    assert sampling(http) == sampling(http, 0)


def test_vendor_fields_are_ignored(http):
    vendor = {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "foo": {"bar": 1},
        "user": "u1",
        "tool_choice": "auto",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
    }
    messages = [{"role": "user", "content": "hi", "name": None, "refusal": None}]
    assert answer(http, messages, **vendor)["choices"][0]["message"]["content"]
    assert sampling(http).grammar is None


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", 0, 0),
        ("temperature", 1e308, 1e308),
        ("top_p", 1e-9, 1e-9),
        ("top_k", -1, 0),
        ("top_k", 10**30, VOCAB_SIZE),
        ("min_p", 1, 1),
        ("presence_penalty", -2, -2),
        ("frequency_penalty", 2.0, 2),
        ("repetition_penalty", 0.1, 0.1),
        ("logit_bias", {"5": -100, "0": 100}, {5: -100, 0: 100}),
        ("seed", 0, 0),
        ("seed", (1 << 63) - 1, (1 << 63) - 1),
        ("seed", -(1 << 63), -(1 << 63)),
        ("stop_token_ids", [7, 7, 9], (7, 9)),
        ("ignore_eos", True, True),
        ("min_tokens", 3, 3),
        ("cache_salt", "mine", "mine"),
    ],
)
def test_good_values(http, field, value, expected):
    answer(http, **{field: value})
    assert getattr(sampling(http), field) == expected


BAD = [
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", -1),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": None}),
    ("logit_bias", [1]),
    ("seed", 1 << 63),
    ("seed", 1 << 64),
    ("seed", -(1 << 63) - 1),
    ("seed", 1.5),
    ("seed", "1"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", [1]),
    ("stop", "x" * 1001),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1, VOCAB_SIZE]),
    ("stop_token_ids", [10**30]),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("top_logprobs", 3),  # without logprobs
    ("logprobs", 3),
    ("stream", "yes"),
    ("response_format", {"type": "yaml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", "json"),
    ("tools", [{"type": "retrieval"}]),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "function", "function": {"name": ""}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": 3}}]),
    ("tools", [3]),
    ("tool_choice", "required"),  # without tools
    ("tool_choice", "sometimes"),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("function_call", {"name": "f"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("web_search_options", {"a": 1}),
    ("guided_json", {"type": "object"}),
    ("use_beam_search", True),
    ("chat_template", "{{ 1 }}"),
    ("truncate_prompt_tokens", 5),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", [1]),
    ("continue_final_message", True),  # the last message is the user's
    ("priority", "urgent"),
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", [{"content": "hi"}]),
    ("messages", [{"role": "robot", "content": "hi"}]),
    ("messages", [{"role": "user", "content": 3}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "assistant", "function_call": {"name": "f"}}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}]),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
    ),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_values(http, field, value):
    error = error_of(chat(http, **{"messages": HI, field: value}))
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0].split("[")[0] == field
    assert not http.client.calls, "it must not reach the engine"
    assert answer(http)


def test_raw_numbers_and_surrogates(http):
    for raw in (b"NaN", b"Infinity", b"1e999", b"9" * 5000):
        for field in (b"temperature", b"max_tokens", b"seed"):
            body = b'{"messages":[{"role":"user","content":"x"}],"%b":%b}' % (field, raw)
            error_of(http.post("/v1/chat/completions", body))
    for text in (rb"\ud83d", rb"\udd99 x"):
        for body in (
            b'{"messages":[{"role":"user","content":"%b"}]}',
            b'{"messages":[{"role":"user","content":"x"}],"stop":"%b"}',
            b'{"messages":[{"role":"user","content":"x"}],"stop":["%b"]}',
            b'{"messages":[{"role":"user","content":"x"}],"user":"%b"}',
            b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":"%b"}}',
        ):
            error_of(http.post("/v1/chat/completions", body % text))
    body = rb'{"messages":[{"role":"user","content":"\ud83e\udd99"}]}'
    assert http.post("/v1/chat/completions", body).status_code == 200
    assert "🦙" in prompt(http)


def test_nested_tools_are_refused(http):
    deep = b'{"a":' * 1000 + b"1" + b"}" * 1000
    tool = b'{"type":"function","function":{"name":"f","parameters":%b}}' % deep
    body = b'{"messages":[{"role":"user","content":"x"}],"tools":[%b]}' % tool
    error_of(http.post("/v1/chat/completions", body))
    arguments = json.dumps('{"a":' * 5000 + "1" + "}" * 5000)
    call = '{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}'
    body = '{"messages":[%s]}' % (call % arguments)
    error_of(http.post("/v1/chat/completions", body.encode()))


# Lengths


def test_max_tokens(http):
    cases = [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": None, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
    ]
    for fields, count in cases:
        body = answer(http, **fields)
        assert body["usage"]["completion_tokens"] == count
        assert body["choices"][0]["finish_reason"] == "length"
    body = answer(http, max_tokens=200)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert error_of(chat(http, max_tokens=4, max_completion_tokens=5))["param"]
    assert error_of(chat(http, max_tokens=4, min_tokens=5))["param"] == "min_tokens"


@pytest.mark.parametrize("pages", [0, 100, 4096])
def test_what_does_not_fit_is_cut(backend, pages):
    http = http_of(StubLLM([65] * 500, backend, generation={"max_kv_tokens": pages}))
    limit = min(256, pages or 256)
    for fields in ({}, {"max_tokens": None}, {"max_tokens": 10**30}, {"min_tokens": 10**30}):
        usage = answer(http, **fields)["usage"]
        assert usage["total_tokens"] == limit
        assert sampling(http).min_tokens <= sampling(http).max_tokens


@pytest.mark.parametrize("pages", [100, 4096])
def test_too_long(backend, pages):
    http = http_of(StubLLM([65], backend, generation={"max_kv_tokens": pages}))
    limit = min(256, pages)
    fixed = answer(http, [{"role": "user", "content": ""}])["usage"]["prompt_tokens"]
    fits = [{"role": "user", "content": "z" * (limit - fixed - 1)}]
    assert answer(http, fits)["usage"]["completion_tokens"] == 1
    over = [{"role": "user", "content": "z" * (limit - fixed)}]
    error = error_of(chat(http, over))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert str(limit) in error["message"]


def test_huge_messages_are_refused_before_all_is_tokenised(http):
    error = error_of(chat(http, [{"role": "user", "content": "lorem ipsum " * 500_000}]))
    assert error["code"] == "context_length_exceeded"
    assert "more than" in error["message"]
    assert "256" in error["message"]


# Prompts


def test_prompt(http):
    answer(http, [{"role": "system", "content": "s"}, *HI])
    assert prompt(http) == "<|system|>s<|end|><|user|>hi<|end|><|assistant|>"
    answer(http, add_generation_prompt=False)
    assert prompt(http) == "<|user|>hi<|end|>"


def test_no_second_bos():
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    facts = {"chat_templates": {"default": template}}
    http = http_of(StubLLM([END], byte_tokenizer(bos=True), tokenizer=facts))
    answer(http)
    assert http.client.calls[-1][0].count(BOS) == 1
    answer(http, add_special_tokens=True)
    assert http.client.calls[-1][0].count(BOS) == 2  # as asked


def test_developer_is_system_unless_the_template_knows_better(backend, http):
    answer(http, [{"role": "developer", "content": "d"}, *HI])
    assert prompt(http).startswith("<|system|>d")
    template = "{% for m in messages %}{% if m.role == 'developer' %}!{% endif %}{% endfor %}?"
    facts = {"chat_templates": {"default": template}}
    http = http_of(StubLLM([END], backend, tokenizer=facts))
    answer(http, [{"role": "developer", "content": "d"}])
    assert prompt(http) == "!?"


@pytest.mark.parametrize("content", [None, "", "absent", []])
@pytest.mark.parametrize("form", ["{{ m.content }}", "{{ m['content'] + '' }}"])
def test_no_content_is_empty_content(backend, content, form):
    template = (
        "{% for m in messages %}[" + form + "]{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
        "{% endfor %}"
    )
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": {"default": template}}))
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "w", "arguments": '{"city":"Oslo"}'}
    turn = {"role": "assistant", "tool_calls": [call]}
    if content != "absent":
        turn["content"] = content
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    answer(http, [*HI, turn, result, {"role": "user", "content": "ok?"}])
    assert prompt(http) == "[hi][]city=Oslo[rain][ok?]"


def test_text_parts(http):
    parts = [{"type": "text", "text": "a"}]
    answer(http, [{"role": "user", "content": parts}])
    assert "<|user|>a<|end|>" in prompt(http)


@pytest.mark.parametrize("template", ["trim", "keep"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon  ", " a time "])
def test_continue_final_message(backend, template, content):
    form = "{{ m.content | trim }}" if template == "trim" else "{{ m.content }}"
    source = "{% for m in messages %}<|user|>" + form + "<|end|>{% endfor %}"
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": {"default": source}}))
    turn = {"role": "assistant", "content": content}
    answer(http, [*HI, turn], continue_final_message=True, add_generation_prompt=False)
    shown = content.strip() if template == "trim" else content
    assert prompt(http) == f"<|user|>hi<|end|><|user|>{shown}"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error_of(chat(http, [*HI, turn], **both))["param"] == "continue_final_message"


def test_template_variables(backend):
    source = "{{ messages[0].content }}{{ mood }}{{ reasoning_effort }}{{ documents[0].text }}"
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": {"default": source}}))
    fields = {"chat_template_kwargs": {"mood": "glad"}, "reasoning_effort": "low"}
    answer(http, documents=[{"text": "D"}], **fields)
    assert prompt(http) == "higladlowD"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no system role, please') }}", "no system role, please"),
        ("{% for", "template"),
        ("{{ nothing.at.all }}", "template"),
        ("{{ 1 / 0 }}", "template"),
        ("", "empty"),
    ],
)
def test_template_errors(backend, source, words):
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": {"default": source}}))
    error = error_of(chat(http))
    assert error["param"] == "messages"
    assert words in error["message"]


def test_no_template(backend):
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": {}}))
    assert "no chat template" in error_of(chat(http))["message"]
    assert http.post("/v1/completions", {"prompt": "x"}).status_code == 200


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
    assert sampling(http).logprobs is None


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
    assert sampling(http).grammar == "{}"
    schema = {"type": "object", "properties": {"z": {}, "a": {"const": "é"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer(http, response_format=form)
    assert json.loads(sampling(http).grammar) == schema
    assert sampling(http).grammar.index('"z"') < sampling(http).grammar.index('"a"')


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
    assert prompt(agent) == f"[{json.dumps(WEATHER)}]hi"
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
    assert "weather" not in prompt(agent)


def test_a_call_that_is_cut_off_is_text(agent):
    agent.client.say('<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
    choice = answer(agent, tools=[WEATHER], max_tokens=9)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("<tool_call>")


def test_tools_need_a_template_that_shows_them(http):
    assert error_of(chat(http, tools=[WEATHER]))["param"] == "tools"
    assert chat(http, tools=[WEATHER], tool_choice="none").status_code == 200


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
    schema = json.loads(sampling(agent).grammar)
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


# Anything at all

WORDS = st.sampled_from([*NULLS, "messages", "echo", "logprobs", "min_tokens"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "auto", "json_object", "function", 0, 1, -1, 1 << 63, 1 << 64]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "1"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
FUZZED = http_of(StubLLM([65, 66, 67, END]))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(WORDS, VALUES, max_size=5), st.booleans())
def test_any_body_is_answered(fields, whole):
    body = {**({"messages": HI} if whole else {}), **fields}
    response = FUZZED.post("/v1/chat/completions", json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response, response.status_code)
    assert FUZZED.client.running == 0


# A real checkpoint's tokenizer and template


@pytest.mark.golden
def test_smollm_prompt():
    from transformers import AutoTokenizer

    if not SMOLLM.is_dir():
        pytest.skip(f"{SMOLLM} is not there; `make models` fetches it")
    oracle = AutoTokenizer.from_pretrained(SMOLLM)
    backend = tokenizers.Tokenizer.from_file(str(SMOLLM / "tokenizer.json"))
    facts = {
        "special_tokens": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        "chat_templates": {"default": (SMOLLM / "chat_template.jinja").read_text()},
    }
    client = StubLLM(backend=backend, tokenizer=facts, generation={"eos_token_ids": (2,)})
    client.script = [*backend.encode("Größe 🦙🧪 日本").ids, 2]
    http = http_of(client)
    messages = [{"role": "system", "content": "Be brief. 🦙"}, {"role": "user", "content": " hé\n"}]
    body = answer(http, messages)
    assert body["choices"][0]["message"]["content"] == "Größe 🦙🧪 日本"
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert client.calls[-1][0] == expected
    messages.append({"role": "assistant", "content": "So it is"})
    answer(http, messages, continue_final_message=True)
    expected = oracle.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert client.calls[-1][0] == expected
