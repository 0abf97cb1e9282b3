"""POST /tokenize of a conversation."""

import pytest

from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import END, HI, StubLLM, answer, byte_tokenizer, http_of


@pytest.fixture(scope="module")
def backend():
    return byte_tokenizer()


def test_tokenize_gives_the_prompt_of_a_conversation(backend):
    http = http_of(StubLLM([END], backend))
    for fields, end in (
        ({}, "<|assistant|>"),
        ({"add_generation_prompt": False}, ""),
        ({"continue_final_message": True, "add_generation_prompt": False}, None),
    ):
        messages = [*HI, {"role": "assistant", "content": "Ho"}] if end is None else HI
        found = http.post("/tokenize", {"messages": messages, **fields}).json()
        text = "<|user|>hi<|end|>" + ("<|assistant|>Ho" if end is None else end)
        assert found["tokens"] == backend.encode(text, add_special_tokens=False).ids
        assert found["count"] == len(found["tokens"])
    answer(http)
    assert http.post("/tokenize", {"messages": HI}).json()["tokens"] == http.client.calls[-1][0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HI, "prompt": "a"}, "messages"),
        ({"messages": HI, "inputs": "a"}, "inputs"),
        ({"messages": [{"role": "user", "content": "x" * 41}]}, "messages[0]"),
        ({"messages": [*HI, *HI]}, "messages"),
        ({"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_conversations_that_are_not_tokenised(backend, body, param):
    http = http_of(StubLLM([END], backend), max_tokenize_chars=40)
    assert error_of(http.post("/tokenize", body))["param"] == param
