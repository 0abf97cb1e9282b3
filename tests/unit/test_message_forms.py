"""Templates that read messages in another form than most: nothing that was said is lost."""

import pytest

from tests.unit.generation_stub import END, HI, StubLLM, answer, byte_tokenizer, http_of, prompt_of

CALL = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": '{"city":"Å"}'}}
TALK = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "wet"},
]
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def backend():
    return byte_tokenizer()


def prompt(backend, template, messages, **fields):
    http = http_of(StubLLM([END], backend, tokenizer={"chat_templates": {"default": template}}))
    answer(http, messages, **fields)
    return prompt_of(http)


@pytest.mark.parametrize("content", ["hello you", [{"type": "text", "text": "hello you"}]])
def test_a_template_of_parts_alone_is_given_parts(backend, content):
    template = (
        "{% for m in messages %}{% for c in m['content'] %}"
        "{% if c['type'] == 'text' %}<{{ c['text'] }}>{% endif %}{% endfor %}{% endfor %}"
    )
    assert prompt(backend, template, [{"role": "user", "content": content}]) == "<hello you>"


def test_a_template_that_fails_on_texts_is_given_parts(backend):
    template = "{% for m in messages %}{{ '<' + m.content[0].text + '>' }}{% endfor %}"
    assert prompt(backend, template, [{"role": "user", "content": "hello"}]) == "<hello>"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_arguments_as_text_and_null_content(backend, tools):
    """As in the templates of DeepSeek's models."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}"
        "{% if m.role == 'assistant' and m['content'] is none %}"
        "{% for c in m['tool_calls'] %}"
        "{{ c['function']['name'] + ':' + c['function']['arguments'] }}{% endfor %}"
        "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    )
    expected = ("rain;" if tools else "") + '[hi]rain:{"city": "Å"}[wet]'
    assert prompt(backend, template, TALK, tools=tools) == expected


def test_arguments_as_text(backend):
    template = (
        "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + ':' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert prompt(backend, template, TALK) == '[hi][]rain:{"city": "Å"}[wet]'


def test_a_template_that_hides_what_was_said_has_its_way(backend):
    assert prompt(backend, "{{ messages | length }}", TALK) == "3"
