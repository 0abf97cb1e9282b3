"""POST /v1/completions, not streamed: prompts, echo, log-probabilities; against a stub engine."""

import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from rose.serving.gateway import generation_input
from rose.serving.gateway.generation_schemas import CompletionAnswer
from tests.unit.gateway_stub import error_of
from tests.unit.generation_stub import BOS, END, VOCAB_SIZE, StubLLM, byte_tokenizer, http_of


@pytest.fixture(scope="module")
def backend():
    return byte_tokenizer()


@pytest.fixture
def http(backend):
    return http_of(StubLLM(backend=backend).say(" is blue, and the grass is green."))


def complete(http, prompt="The sky", **fields):
    return http.post("/v1/completions", {"prompt": prompt, **fields})


def answer(http, prompt="The sky", **fields):
    response = complete(http, prompt, **fields)
    assert response.status_code == 200, response.text
    msgspec.json.decode(response.content, type=CompletionAnswer)
    return json.loads(response.content, parse_constant=pytest.fail)


def ids_of(http):
    return [call[0] for call in http.client.calls]


def test_shape(http):
    body = answer(http)
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    text = " is blue, and the grass is green."
    tokens = http.client.backend.encode("The sky").ids
    generated = http.client.script[:16]
    assert body == {
        "object": "text_completion",
        "model": "llm",
        "system_fingerprint": "llm-1",
        "choices": [
            {
                "index": 0,
                "text": text[: len(http.client.backend.decode(generated))],
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": len(tokens),
            "completion_tokens": 16,  # the default
            "total_tokens": len(tokens) + 16,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert http.post("/completions", {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "rows"),
    [
        ("ab", ["ab"]),
        (["ab"], ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([70, 71], [[70, 71]]),
        ([[70, 71], [72]], [[70, 71], [72]]),
        ([0], [[0]]),
        ([VOCAB_SIZE - 1], [[VOCAB_SIZE - 1]]),
    ],
)
def test_prompt_forms(http, prompt, rows):
    body = answer(http, prompt, n=2)
    encode = http.client.backend.encode
    rows = [encode(row).ids if isinstance(row, str) else row for row in rows]
    assert ids_of(http) == [row for row in rows for _ in range(2)]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(rows)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, rows))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[70], []], "prompt[1]"),
        ([[70], "a"], "prompt[1]"),
        (["a", 70], "prompt[1]"),
        ([VOCAB_SIZE], "prompt[0]"),
        ([999999], "prompt[0]"),
        ([70, -1], "prompt[1]"),
        ([[70], [10**30]], "prompt[1][0]"),
        ([True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ({"text": "a"}, "prompt"),
        (7, "prompt"),
    ],
)
def test_bad_prompts(http, prompt, param):
    assert error_of(complete(http, prompt))["param"] == param
    assert not http.client.calls
    assert answer(http)


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [("tools", [{"type": "function"}], []), ("tool_choice", "required", "none")],
)
def test_tools_are_for_chats(http, field, value, neutral):
    assert error_of(complete(http, "a", **{field: value}))["param"] == field
    answer(http, "a", **{field: neutral})


def test_a_small_request_does_not_fill_the_memory_with_lists(http, monkeypatch):
    monkeypatch.setattr(generation_input, "MAX_LISTED", 100)
    answer(http, "a", n=5, logit_bias={str(token): 1 for token in range(70, 90)})
    answer(http, "a", n=1, stop_token_ids=list(range(70, 90)) * 6)
    for fields in ({"n": 6}, {"prompt": ["a", "b", "c"], "n": 2}):
        bias = {str(token): 1 for token in range(70, 90)}
        body = {"prompt": "a", "logit_bias": bias, **fields}
        assert error_of(http.post("/v1/completions", body))["param"] == "logit_bias"
        body = {"prompt": "a", "stop_token_ids": list(range(70, 90)), **fields}
        assert error_of(http.post("/v1/completions", body))["param"] == "stop_token_ids"
    assert error_of(complete(http, "a", cache_salt="x" * 1001))["param"] == "cache_salt"


def test_empty_prompt_is_bos_where_there_is_one():
    http = http_of(StubLLM([END], byte_tokenizer(bos=True)))
    answer(http, "")
    answer(http, "a")
    assert ids_of(http)[0] == [BOS]
    assert ids_of(http)[1][0] == BOS
    assert error_of(complete(http, "", add_special_tokens=False))["param"] == "prompt"
    answer(http, "a", add_special_tokens=False)
    assert BOS not in ids_of(http)[-1]


def test_order_and_seeds(backend):
    http = http_of(StubLLM(lambda ids, sampling: [ids[0], 80 + sampling.seed], backend))
    body = answer(http, ["a", "b"], n=3, seed=1)
    word = http.client.backend.decode
    expected = [a + word([80 + seed]) for a in "ab" for seed in (1, 2, 3)]
    assert [choice["text"] for choice in body["choices"]] == expected


def test_too_many_choices(http):
    error = error_of(complete(http, ["a"] * 17, n=128))
    assert error["param"] == "prompt"
    assert "2048" in error["message"]


def test_too_long(http):
    error = error_of(complete(http, ["a", "z" * 256]))
    assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")
    assert "256" in error["message"]
    assert answer(http, "z" * 255)["usage"]["completion_tokens"] == 1
    error_of(complete(http, [70] * 256))
    assert answer(http, [70] * 256, echo=True, max_tokens=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("best_of", 3),
        ("best_of", 0),
        ("suffix", "end"),
        ("echo", "yes"),
        ("temperature", -1),
        ("stop", ""),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("top_p", 0),
    ],
)
def test_bad_values(http, field, value):
    assert error_of(complete(http, **{field: value}))["param"] == field
    assert not http.client.calls


def test_good_values(http):
    assert answer(http, best_of=2, n=2)
    assert answer(http, suffix="", best_of=None)
    assert answer(http, response_format={"type": "json_object"})
    assert http.client.calls[-1][1].grammar == '{"type": "object"}'


# Echo and log-probabilities


def test_echo(http):
    assert answer(http, "The sky", echo=True, max_tokens=3)["choices"][0]["text"][:7] == "The sky"
    special = "<|user|>The sky"
    for prompt in (special, http.client.backend.encode(special).ids):
        text = answer(http, prompt, echo=True, max_tokens=3)["choices"][0]["text"]
        assert text.startswith(special)
    body = answer(http, ["a", "b"], n=2, echo=True, max_tokens=1)
    assert [choice["text"][0] for choice in body["choices"]] == ["a", "a", "b", "b"]


def test_echo_alone(http):
    body = answer(http, echo=True, max_tokens=0)
    assert body["choices"][0]["text"] == "The sky"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert http.client.calls[0][1].max_tokens == 0
    assert http.client.calls[0][1].prompt_logprobs is None


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 20])
@pytest.mark.parametrize("prompt", ["Größe 🧪", [70, 71, 72], "x"])
def test_echo_and_logprobs(http, prompt, max_tokens, count):
    http.client.logprob_of = lambda token: -token / 16
    http.client.say("🦙日")
    choice = answer(http, prompt, echo=True, logprobs=count, max_tokens=max_tokens)["choices"][0]
    found, text = choice["logprobs"], choice["text"]
    given = http.client.calls[0][0]
    tokens = [*given, *http.client.script[:max_tokens]]
    assert {len(values) for values in found.values()} == {len(tokens)}
    assert found["token_logprobs"] == [None, *(-token / 16 for token in tokens[1:])]
    assert found["top_logprobs"][0] is None
    for word, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert word in top
        assert count <= len(top) + 1  # two tokens may read alike
    decode = http.client.backend.decode
    whole = [decode(tokens[:end], skip_special_tokens=True) for end in range(len(tokens))]
    starts = [len(before.rstrip("\N{REPLACEMENT CHARACTER}")) for before in whole]
    assert found["text_offset"] == starts
    assert text == decode(tokens)


def test_first_token_of_the_tokenizer_takes_no_room():
    http = http_of(StubLLM([66, END], byte_tokenizer(bos=True)))
    choice = answer(http, "ab", echo=True, logprobs=1)["choices"][0]
    assert choice["text"].startswith("ab")
    assert choice["logprobs"]["tokens"][:3] == ["<|bos|>", "a", "b"]
    assert choice["logprobs"]["text_offset"][:4] == [0, 0, 1, 2]


def test_bytes_that_are_no_text(http):
    llama = http.client.backend.encode("🧪").ids
    assert len(llama) > 1
    http.client.script = llama
    found = answer(http, logprobs=0)["choices"][0]["logprobs"]
    assert all(word.startswith("bytes:\\x") for word in found["tokens"][1:])
    assert found["tokens"] == [next(iter(top)) for top in found["top_logprobs"]]


def test_offsets_stay_when_a_stop_string_cuts(http):
    http.client.say("abcdef")
    choice = answer(http, "x", logprobs=0, stop="cd")["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == list("abcd")
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_impossible_tokens_have_a_floor(http):
    http.client.logprob_of = lambda _: -math.inf
    fields = {"echo": True, "top_k": 1, "logit_bias": {"28": -100}, "seed": 1, "max_tokens": 3}
    found = answer(http, "green tea and", logprobs=5, **fields)["choices"][0]["logprobs"]
    assert set(found["token_logprobs"]) == {None, -9999.0}
    http.client.logprob_of = lambda _: math.nan
    assert error_of(complete(http, logprobs=5), 500)["code"] == "non_finite"
    assert error_of(complete(http, logprobs=5, echo=True, max_tokens=0), 500)


def test_a_tokenizer_that_changes_text():
    """What the prompt was comes back, and offsets stay within it."""
    backend = byte_tokenizer()
    backend.add_tokens([AddedToken("the sky", lstrip=True, rstrip=True)])
    http = http_of(StubLLM([66, END], backend))
    choice = answer(http, "   the sky   !", echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert choice["text"].startswith("   the sky   !")
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] == len("   the sky   !")


FUZZED = http_of(StubLLM([65, 66, 67, END]))
FIELDS = st.sampled_from(
    [
        "prompt",
        "echo",
        "logprobs",
        "best_of",
        "suffix",
        "max_tokens",
        "min_tokens",
        "n",
        "stop",
        "stop_token_ids",
        "seed",
        "logit_bias",
        "response_format",
        "temperature",
        "stream",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.integers(-2, 400),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(FIELDS, VALUES, max_size=5), st.booleans())
def test_any_body_is_answered(fields, whole):
    body = {**({"prompt": "hi"} if whole else {}), **fields}
    response = FUZZED.post("/v1/completions", json.dumps(body).encode())
    assert response.status_code in (200, 400), response.text
    if response.status_code != 200:
        error_of(response)
    assert FUZZED.client.running == 0
