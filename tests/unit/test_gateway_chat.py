"""POST /v1/chat/completions, not streamed: the answer and the fields; against a stub engine."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.serving.gateway.generation_schemas import ChatRequest, CompletionRequest
from rose.serving.gateway.routes import OPERATIONS
from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import (
    END,
    HI,
    VOCAB_SIZE,
    StubLLM,
    answer,
    byte_tokenizer,
    chat,
    http_of,
    prompt_of,
    sampling_of,
)


@pytest.fixture(scope="module")
def backend():
    return byte_tokenizer()


@pytest.fixture
def http(backend):
    return http_of(StubLLM(backend=backend).say("Good day to you."))


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
        "add_special_tokens allowed_token_ids bad_words cache_salt custom_logit_processor "
        "dry_multiplier ebnf epsilon_cutoff eta_cutoff frequency_penalty grammar "
        "guided_choice guided_grammar guided_json guided_regex ignore_eos "
        "include_stop_str_in_output json_schema logit_bias logits_processors logprobs "
        "max_completion_tokens max_new_tokens max_tokens min_new_tokens min_p min_tokens "
        "mirostat model n n_predict repeat_penalty stop_sequences "
        "no_repeat_ngram_size num_beams penalty_alpha presence_penalty priority "
        "prompt_logprobs regex repetition_penalty request_id response_format seed "
        "skip_special_tokens stop stop_regex stop_token_ids stream stream_options "
        "structural_tag structured_outputs temperature tfs_z top_a top_k top_p "
        "truncate_prompt_tokens typical_p use_beam_search user xtc_probability"
    )
    chat_fields = (
        "add_generation_prompt audio chat_template chat_template_kwargs continue_final_message "
        "documents echo function_call functions messages modalities parallel_tool_calls "
        "reasoning_effort tool_choice tools top_logprobs web_search_options"
    )
    completion_fields = "best_of echo prompt suffix tool_choice tools"
    for kind, own in ((ChatRequest, chat_fields), (CompletionRequest, completion_fields)):
        assert set(kind.__struct_fields__) == {*common.split(), *own.split()}


# Fields


def test_defaults(http):
    answer(http)
    found = sampling_of(http)
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
    found = sampling_of(http)
    assert {name: getattr(found, name) for name in facts} == facts
    assert found.repetition_penalty == 1.1
    answer(http, temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
    found = sampling_of(http)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0, 0, 1, 0)
    assert found.repetition_penalty == 1


def test_bans_of_the_checkpoint_hold_unless_a_request_says_otherwise(backend):
    facts = {"logit_bias": {7: -100.0, 8: -100.0}, "min_tokens": 2}
    http = http_of(StubLLM([END], backend, generation=facts))
    answer(http)
    assert sampling_of(http).logit_bias == {7: -100, 8: -100}
    assert sampling_of(http).min_tokens == 2
    answer(http, logit_bias={"8": 0, "9": 1}, min_tokens=0)
    assert sampling_of(http).logit_bias == {7: -100, 8: 0, 9: 1}
    assert sampling_of(http).min_tokens == 0
    answer(http, max_tokens=1)
    assert sampling_of(http).min_tokens == 1


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("no_repeat_ngram_size", 3, 0),
        ("num_beams", 4, 1),
        ("typical_p", 0.5, 1.0),
        ("mirostat", 2, 0),
        ("grammar", "root ::= a", ""),
        ("json_schema", {}, None),
        ("allowed_token_ids", [5], []),
        ("xtc_probability", 0.1, 0.0),
        ("max_new_tokens", 5, None),
        ("n_predict", 5, -1),
        ("repeat_penalty", 1.2, 1.0),
        ("stop_sequences", ["a"], []),
    ],
)
def test_what_other_servers_know_and_would_change_the_text_is_refused(http, name, value, neutral):
    assert error_of(chat(http, **{name: value}))["param"] == name
    assert chat(http, **{name: neutral}).status_code == 200


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
    assert sampling_of(http) == sampling_of(http, 0)


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
    assert sampling_of(http).grammar is None


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
        ("repetition_penalty", 0.01, 0.01),
        ("repetition_penalty", 100, 100),
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
    assert getattr(sampling_of(http), field) == expected


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
    ("repetition_penalty", 1e-38),
    ("repetition_penalty", 0.0099),
    ("repetition_penalty", 1e38),
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
    ("web_search_options", {}),  # asks for a search with nothing but defaults
    ("guided_json", {"type": "object"}),
    ("use_beam_search", True),
    ("chat_template", "{{ 1 }}"),
    ("truncate_prompt_tokens", 5),
    ("prompt_logprobs", 0),  # asks for those of the prompt's tokens alone
    ("chat_template_kwargs", {"parts": True}),
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
    assert "🦙" in prompt_of(http)


def test_nested_tools_are_refused(http):
    deep = b'{"a":' * 1000 + b"1" + b"}" * 1000
    tool = b'{"type":"function","function":{"name":"f","parameters":%b}}' % deep
    body = b'{"messages":[{"role":"user","content":"x"}],"tools":[%b]}' % tool
    error_of(http.post("/v1/chat/completions", body))
    arguments = json.dumps('{"a":' * 5000 + "1" + "}" * 5000)
    call = '{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}'
    body = '{"messages":[%s]}' % (call % arguments)
    error_of(http.post("/v1/chat/completions", body.encode()))


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
