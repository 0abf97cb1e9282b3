"""POST /v1/chat/completions: what the model gets to read, and how long it may be."""

from pathlib import Path

import pytest
import tokenizers

from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import (
    BOS,
    END,
    HI,
    StubLLM,
    answer,
    byte_tokenizer,
    chat,
    http_of,
    prompt_of,
    sampling_of,
)

SMOLLM = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def backend():
    return byte_tokenizer()


@pytest.fixture
def http(backend):
    return http_of(StubLLM(backend=backend).say("Good day to you."))


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
        assert sampling_of(http).min_tokens <= sampling_of(http).max_tokens


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
    assert prompt_of(http) == "<|system|>s<|end|><|user|>hi<|end|><|assistant|>"
    answer(http, add_generation_prompt=False)
    assert prompt_of(http) == "<|user|>hi<|end|>"


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
    assert prompt_of(http).startswith("<|system|>d")
    template = "{% for m in messages %}{% if m.role == 'developer' %}!{% endif %}{% endfor %}?"
    facts = {"chat_templates": {"default": template}}
    http = http_of(StubLLM([END], backend, tokenizer=facts))
    answer(http, [{"role": "developer", "content": "d"}])
    assert prompt_of(http) == "!?"


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
    assert prompt_of(http) == "[hi][]city=Oslo[rain][ok?]"


def test_text_parts(http):
    parts = [{"type": "text", "text": "a"}]
    answer(http, [{"role": "user", "content": parts}])
    assert "<|user|>a<|end|>" in prompt_of(http)


@pytest.mark.parametrize("template", ["trim", "keep"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon  ", " a time "])
def test_continue_final_message(backend, template, content):
    form = "{{ m.content | trim }}" if template == "trim" else "{{ m.content }}"
    source = "{% for m in messages %}<|user|>" + form + "<|end|>{% endfor %}"
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": {"default": source}}))
    turn = {"role": "assistant", "content": content}
    answer(http, [*HI, turn], continue_final_message=True, add_generation_prompt=False)
    shown = content.strip() if template == "trim" else content
    assert prompt_of(http) == f"<|user|>hi<|end|><|user|>{shown}"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error_of(chat(http, [*HI, turn], **both))["param"] == "continue_final_message"


def test_template_variables(backend):
    source = "{{ messages[0].content }}{{ mood }}{{ reasoning_effort }}{{ documents[0].text }}"
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": {"default": source}}))
    fields = {"chat_template_kwargs": {"mood": "glad"}, "reasoning_effort": "low"}
    answer(http, documents=[{"text": "D"}], **fields)
    assert prompt_of(http) == "higladlowD"


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


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":"\\ud800"}',
        '{"\\udc00":1}',
        '{"a":NaN}',
        '{"a":1e999}',
        '{"a":1,"a":2}',
        '{"a":' + "[" * 70 + "]" * 70 + "}",
        "{oops",
        "[1]",
    ],
)
def test_tool_arguments_are_as_strict_as_a_body(backend, arguments):
    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": {"default": template}}))
    call = {"function": {"name": "w", "arguments": arguments}}
    error = error_of(chat(http, [*HI, {"role": "assistant", "tool_calls": [call]}]))
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    ("part", "field"), [({"type": "text"}, "text"), ({"type": "image_url"}, "type")]
)
def test_a_fault_in_a_part_names_the_part(http, part, field):
    content = [{"type": "text", "text": "a"}, part]
    error = error_of(chat(http, [*HI, {"role": "user", "content": content}]))
    assert error["param"] == f"messages[1].content[1].{field}"


def test_no_half_of_a_surrogate_pair_reaches_the_tokenizer(backend):
    templates = {"default": r"{{ '\ud800' }}"}
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": templates}))
    assert "surrogate" in error_of(chat(http))["message"]


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
    size = backend.get_vocab_size()
    client = StubLLM(
        backend=backend, tokenizer=facts, vocab_size=size, generation={"eos_token_ids": (2,)}
    )
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
