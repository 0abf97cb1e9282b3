"""Chat templates against transformers' rendering, and templates that fail or run away."""

import copy
import re
import threading
import time
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rose.models.card import ModelCard, TokenizerCard
from rose.serving.gateway import template_sandbox
from rose.serving.gateway.conversation import render_turns, turns_of
from rose.serving.gateway.generation_schemas import ChatRequest
from rose.serving.gateway.templates import TemplateError, render

SMOLLM = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if date_string is defined %}{{ "Today: " + date_string + "\\n" }}{% endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{ content }}{% endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- set call = tool_call.function if tool_call.function else tool_call %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL}

USER = {"role": "user", "content": " Wie heißt <b>'du'</b>? \n"}
TALK = [USER, {"role": "assistant", "content": "ROSE."}, {"role": "user", "content": "ok 🌹"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": {"city": "Oslö"}}}
TOOL_TALK = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "user", "content": "ok?"},
]
SYSTEM_TALK = [{"role": "system", "content": "Be brief."}, *TALK]
REASONING = [*TALK, {"role": "assistant", "content": "fine", "reasoning": "\nhm\n"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "w",
            "description": "weather <now> & 'then'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def card_of(source: str) -> TokenizerCard:
    return TokenizerCard(special_tokens=SPECIAL, chat_templates={"default": source})


def rendered(source: str, messages=(USER,), **variables) -> str:
    return render(card_of(source), messages, **variables)


def model_card(source: str) -> ModelCard:
    facts = dict.fromkeys(["name", "path", "architecture", "dtype", "fingerprint"], "x")
    numbers = dict.fromkeys(["vocab_size", "max_model_len", "created"], 1)
    return ModelCard(**facts, **numbers, tasks=("generate",), tokenizer=card_of(source))


def oracle(source: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="</s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
    tokenizer.chat_template = source
    return tokenizer


CASES = [
    ("llama", TALK, {}),
    ("llama", SYSTEM_TALK, {"date_string": "1 May"}),
    ("llama", TOOL_TALK, {"tools": TOOLS}),
    ("qwen", TALK, {}),
    ("qwen", SYSTEM_TALK, {"tools": TOOLS}),
    ("qwen", TOOL_TALK, {"tools": TOOLS, "enable_thinking": False}),
    ("qwen", REASONING, {}),
    ("mistral", TALK, {"bos_token": "<other>"}),
]


@pytest.mark.parametrize(("name", "messages", "options"), CASES)
@pytest.mark.parametrize("prompt", [True, False])
def test_text_equals_transformers(name, messages, options, prompt):
    source = TEMPLATES[name]
    expected = oracle(source).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt, **options
    )
    given = copy.deepcopy(messages)
    assert rendered(source, given, add_generation_prompt=prompt, **options) == expected
    assert given == messages


@pytest.mark.parametrize("name", ["llama", "qwen", "mistral"])
@pytest.mark.parametrize("content", ["The answer is", "It ends with a blank ", "two\n\n"])
def test_a_final_message_to_continue_equals_transformers(name, content):
    messages = [USER, {"role": "assistant", "content": content}]
    expected = oracle(TEMPLATES[name]).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    body = msgspec.convert({"messages": messages, "continue_final_message": True}, ChatRequest)
    card = model_card(TEMPLATES[name])
    assert render_turns(body, turns_of(body, card), card) == expected


@pytest.mark.golden
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", [TALK, SYSTEM_TALK, [USER]])
def test_a_real_template(messages, prompt):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SMOLLM)
    card = TokenizerCard(
        special_tokens={"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token},
        chat_templates={"default": tokenizer.chat_template},
    )
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert render(card, messages, add_generation_prompt=prompt) == expected


# Messages


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}",
        "{% for m in messages %}{{ '[' + m['role'] + ':' + m['content'] + ']' }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_missing_content_is_an_empty_text(source, content):
    messages = [USER, {"role": "assistant", "tool_calls": [CALL], **content}]
    text = rendered(source, messages)
    assert text == f"[user:{USER['content']}][assistant:]"


def test_keys_that_are_null_are_left_out():
    source = "{{ messages[0].name is defined }}{{ 'tool_calls' in messages[0] }}"
    message = {"role": "user", "content": "x", "name": None, "tool_calls": None}
    assert rendered(source, [message]) == "FalseFalse"


def test_an_empty_list_of_tool_calls_is_none_at_all():
    source = (
        "{% for m in messages %}{% if 'tool_calls' in m %}"
        "{{ raise_exception('one call at a time') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert rendered(source, [{"role": "assistant", "content": "x", "tool_calls": []}]) == "x"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [('{"city": "Oslö"}', "Oslö"), ({"city": "Rom"}, "Rom"), ("", ""), (None, "")],
)
def test_tool_arguments_reach_the_template_as_a_mapping(arguments, printed):
    source = (
        "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a is mapping }}{{ a.city }}"
    )
    call = {"id": "1", "function": {"name": "w", "arguments": arguments}}
    text = rendered(source, [{"role": "assistant", "tool_calls": [call]}])
    assert text == f"True{printed}"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = rendered("{{ messages[0].content }}", [{"role": "user", "content": parts}])
    assert text == "onetwo"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages[1].content[1].type",
        ),
        ({"content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"content": [7]}, "messages[1].content[0].type"),
        ({"content": 7}, "messages[1].content"),
        ({"tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0].function"),
        (
            {"tool_calls": [{"function": {"name": "w", "arguments": "{oops"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {"tool_calls": [{"function": {"name": "w", "arguments": "[1]"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_name_the_field(message, field):
    with pytest.raises(TemplateError, match=re.escape(field)):
        rendered(QWEN, [USER, {"role": "assistant", **message}])


def test_documents_and_the_date_reach_the_template():
    source = (
        "{{ documents[0].title }} {{ strftime_now('%Y') }} {{ unknown }}{{ documents is none }}"
    )
    text = rendered(source, documents=[{"title": "T", "text": "x"}])
    assert text == f"T {time.strftime('%Y')} False"
    assert rendered("{{ documents is none and tools is none }}") == "True"


# Which template


def test_named_templates():
    card = TokenizerCard(chat_templates={"default": "D", "tool_use": "T", "rag": "R"})
    assert render(card, [USER]) == "D"
    assert render(card, [USER], template="tool_use") == "T"
    only = TokenizerCard(chat_templates={"default": "D"})
    assert render(only, [USER], template="tool_use") == "D"
    with pytest.raises(TemplateError, match="no default chat template, only: rag"):
        render(TokenizerCard(chat_templates={"rag": "R"}), [USER])


def test_a_model_without_a_template_says_so():
    with pytest.raises(TemplateError, match="no chat template"):
        render(TokenizerCard(), [USER])


# Failures


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (MISTRAL, "Conversation roles must alternate user/assistant/user/assistant/..."),
        ("{{ raise_exception('system role not supported') }}", "system role not supported"),
        ("{% if %}", "line 1: "),
        ("{{ messages[0].content.nope.nope }}", "nope"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "__class__"),
        ("{{ ''.format.__globals__.x }}", "__globals__"),
        ("{% include 'x' %}", "loader"),
        ("{% set ns = namespace(__class__=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
        ("{{ messages.append(1) }}", "append"),
    ],
)
def test_a_failing_template_is_an_error_with_its_message(source, message):
    system = [{"role": "system", "content": "s"}, USER]
    with pytest.raises(TemplateError) as error:
        rendered(source, system)
    assert message in str(error.value)


LONG = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDLESS = {
    "nested loops": LONG + "{% endfor %}{% endfor %}",
    "loops that put out": LONG + "{{ a }}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "loops with a condition": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}"
    "{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "macros that put out": "{% macro f(n) %}{{ messages[0].content * 4000 }}"
    "{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% set ns = namespace(n=0) %}{% for x in [1, 2] recursive %}"
    "{% set ns.n = ns.n + 1 %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "blocks": "{% block a %}{% set ns.d = ns.d + 1 %}{{ self.a() }}{% endblock %}",
}
HUGE = {
    "doubling by ~": "{% set ns = namespace(s='xx') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(s='xx') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling a list": "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "times": "{{ 'x' * 10000000000 }}",
    "times a list": "{{ 1000000000000 * [1] }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "percent": "{{ '%10000000000s' % 'x' }}",
    "percent star": "{{ '%*s' % (10000000000, 'x') }}",
    "format": "{{ '{:10000000000}'.format('x') }}",
    "nested format": "{{ '{:{}}'.format('x', 10000000000) }}",
    "format filter": "{{ '%10000000000s' | format('x') }}",
    "center": "{{ 'x'.center(10000000000) }}",
    "center filter": "{{ 'x' | center(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "indent filter": "{{ 'x\\ny' | indent(10000000000) }}",
    "tojson": "{{ [1] | tojson(indent=10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(10000000000) | list }}",
    "replace": "{{ ('x' * 1000000).replace('x', 'x' * 1000000) }}",
    "replace filter": "{{ ('x' * 1000000) | replace('x', 'x' * 1000000) }}",
    "join": "{{ ('x' * 1000000).join(['x'] * 1000000) }}",
    "join filter": "{{ ['x'] * 1000000 | join('x' * 1000000) }}",
    "join of an iterator": "{{ range(99999) | map('string') | join('x' * 1000000) }}",
    "range": "{{ range(10000000000) | list }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}",
    "output of constants": LONG + "x" * 10000 + "{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(name, monkeypatch):
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TemplateError):
        rendered("{% set ns = namespace(d=0) %}" + ENDLESS[name])
    assert time.monotonic() - start < 4


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_makes_too_much_is_stopped(name, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_TEXT", 1 << 21)
    monkeypatch.setattr(template_sandbox, "MAX_TOTAL", 1 << 24)
    start = time.monotonic()
    with pytest.raises(TemplateError):
        rendered(HUGE[name])
    assert time.monotonic() - start < 4


@pytest.mark.alone
def test_a_long_conversation_is_within_the_budget():
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "word " * 500} for i in range(801)
    ]
    start = time.monotonic()
    text = rendered(QWEN, messages)
    assert len(text) > 2_000_000
    assert time.monotonic() - start < 2


def test_ordinary_use_of_what_is_guarded():
    source = (
        "{{ 'a-b'.replace('-', '+') }} {{ 'ab' | replace('b', 'c') }} {{ ', '.join(['a', 'b']) }} "
        "{{ ['a', 'b'] | join('/') }} {{ 'n: %5d, 5551234567' % 7 }} {{ '{:>3} {a}'.format('x', a=1) }} "
        "{{ 'x' | center(3) }} {{ 'a\\nb' | indent(2) }} {{ 2 ** 64 * 3 }} {{ '-' * 3 }} "
        "{{ {'b': 1, 'a': '<ü>'} | tojson(indent=1) }} {{ dict(a=1).a }} {{ 1700000000 | string }} "
        "{{ messages | map(attribute='role') | join }} {{ 'é' ~ 1 ~ none }}"
    )
    expected = oracle(source).apply_chat_template([USER], tokenize=False)
    assert rendered(source) == expected


def test_threads_share_a_template():
    seen: list[bool] = []

    def work(number: int) -> None:
        for turn in range(30):
            text = f"{number} {turn}"
            seen.append(text in rendered(QWEN, [{"role": "user", "content": text}]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 120
