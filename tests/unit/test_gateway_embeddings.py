"""POST /v1/embeddings: every field, against a stub engine."""

import base64
import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.serving.client_api import EngineError
from rose.serving.gateway.embedding_input import prepare
from tests.unit.gateway_stub import Http, StubClient, card, error_of, tokenizer_json, vector

CLS, SEP, A, RED, KITE = 2, 3, 5, 6, 7
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system here') }}{% endif %}"
    "{{ m.content }} {% endfor %}{% if add_generation_prompt %}!{% endif %}"
)


@pytest.fixture
def http():
    return Http()


def served(**changes):
    """An application with one model of the given card."""
    source = changes.pop("source", None)
    client = StubClient(card(**changes), source)
    http = Http({"stub": client})
    http.client = client
    return http


def ids_of(http):
    return [row.tolist() for row in http.client.calls[-1]["ids"]]


def vectors_of(response):
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data], np.float32)


# Forms of the input


@pytest.mark.parametrize(
    ("given_input", "expected"),
    [
        ("a red", [[CLS, A, RED, SEP]]),
        (["a red"], [[CLS, A, RED, SEP]]),
        (["a", "red kite"], [[CLS, A, SEP], [CLS, RED, KITE, SEP]]),
        ([CLS, RED, SEP], [[CLS, RED, SEP]]),
        ([[CLS, RED, SEP], [KITE]], [[CLS, RED, SEP], [KITE]]),
        ([0], [[0]]),
        ([63], [[63]]),
        ("", [[CLS, SEP]]),
        (["", "   \n"], [[CLS, SEP], [CLS, SEP]]),
        ("[SEP]", [[CLS, SEP, SEP]]),
    ],
)
def test_input_forms(http, given_input, expected):
    response = http.embed(model="stub", input=given_input)
    assert ids_of(http) == expected
    np.testing.assert_allclose(
        vectors_of(response), [vector(row, 16) for row in expected], atol=1e-7
    )
    tokens = sum(map(len, expected))
    body = response.json()
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["object"], body["model"]) == ("list", "stub")
    assert body["data"][0]["object"] == "embedding"


@pytest.mark.parametrize(
    ("given_input", "param"),
    [
        ([], "input"),
        (None, "input"),
        ([[]], "input[0]"),
        ([[5], []], "input[1]"),
        ([True, False], "input[0]"),
        ([[True]], "input[0][0]"),
        ([1.5], "input[0]"),
        ([None], "input[0]"),
        (["a", 3], "input[1]"),
        ([3, "a"], "input[1]"),
        ([[5], "a"], "input[1]"),
        ([[5], 5], "input[1]"),
        ([[5, "red"]], "input[0][1]"),
        ([[[5]]], "input[0][0]"),
        ([-1], "input[0]"),
        ([5, 64], "input[1]"),
        ([[5], [5, -1]], "input[1][1]"),
        ([[64]], "input[0][0]"),
        ([10**30], "input[0]"),
        ({"text": "a"}, "input"),
        (3, "input"),
    ],
)
def test_wrong_input_names_the_place(http, given_input, param):
    assert error_of(http.embed(input=given_input))["param"] == param
    assert http.client.calls == []


def test_missing_input_and_too_many(http):
    assert error_of(http.embed())["param"] == "input"
    http = Http(max_inputs=3)
    assert "at most 3" in error_of(http.embed(input=["a"] * 4))["message"]
    assert "at most 3" in error_of(http.embed(input=[[5]] * 4))["message"]
    assert http.embed(input=[5] * 4).status_code == 200


def test_no_tokens_at_all_is_refused():
    http = served(source=tokenizer_json(specials=False))
    assert error_of(http.embed(input=""))["param"] == "input"
    assert error_of(http.embed(input=["a", " "]))["param"] == "input[1]"
    assert http.embed(input="a").status_code == 200


# What comes back


def test_base64_is_the_bytes_of_the_floats(http):
    floats = vectors_of(http.embed(input=["a", "red"]))
    assert (
        floats.tolist()
        == vectors_of(http.embed(input=["a", "red"], encoding_format="float")).tolist()
    )
    data = http.embed(input=["a", "red"], encoding_format="base64").json()["data"]
    raw = [base64.b64decode(item["embedding"], validate=True) for item in data]
    assert [len(row) for row in raw] == [64, 64]
    np.testing.assert_array_equal([np.frombuffer(row, "<f4") for row in raw], floats)


@pytest.mark.parametrize(
    ("kind", "dtype", "width"),
    [
        ("float32", "<f4", 16),
        ("float16", "<f2", 16),
        ("int8", "i1", 16),
        ("uint8", "u1", 16),
        ("binary", "i1", 2),
        ("ubinary", "u1", 2),
    ],
)
def test_output_dtypes(http, kind, dtype, width):
    plain = http.embed(input="a", output_dtype=kind).json()["data"][0]["embedding"]
    packed = http.embed(input="a", output_dtype=kind, encoding_format="base64").json()["data"][0][
        "embedding"
    ]
    numbers = np.frombuffer(base64.b64decode(packed), dtype)
    assert len(plain) == len(numbers) == width
    np.testing.assert_allclose(plain, numbers.astype(float), rtol=1e-6)
    assert http.client.calls[-1]["options"].output_dtype == kind


@pytest.mark.parametrize(
    ("encoding", "dtype", "expected"),
    [
        ("base64_int8", None, "int8"),
        ("base64_int8", "uint8", "uint8"),
        ("base64_binary", None, "binary"),
        ("base64_binary", "ubinary", "ubinary"),
    ],
)
def test_encodings_that_imply_a_dtype(http, encoding, dtype, expected):
    assert http.embed(input="a", encoding_format=encoding, output_dtype=dtype).status_code == 200
    assert http.client.calls[-1]["options"].output_dtype == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": 3}, "encoding_format"),
        ({"output_dtype": "float64"}, "output_dtype"),
        ({"encoding_format": "base64_int8", "output_dtype": "float32"}, "output_dtype"),
        ({"encoding_format": "base64_binary", "output_dtype": "int8"}, "output_dtype"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -1}, "dimensions"),
        ({"dimensions": 17}, "dimensions"),
        ({"dimensions": 10**25}, "dimensions"),
        ({"dimensions": "8"}, "dimensions"),
        ({"dimensions": 8.5}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"normalize": 1}, "normalize"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 33}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5, "truncate": False}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"priority": "high"}, "priority"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"chat_template": "x"}, "chat_template"),
        ({"late_chunking": True}, "late_chunking"),
        ({"return_multivector": True}, "return_multivector"),
        ({"embedding_types": ["float"]}, "embedding_types"),
        ({"embedding_type": "float"}, "embedding_type"),
        ({"output_dimension": 8}, "output_dimension"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"endianness": "big"}, "endianness"),
        ({"instruction": "find"}, "instruction"),
        ({"normalized": False}, "normalized"),
        ({"task": "retrieval.query"}, "task"),
        ({"truncation": True}, "truncation"),
        ({"use_activation": False}, "use_activation"),
        ({"pooling": "cls"}, "pooling"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"input_type": "haiku"}, "input_type"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
def test_wrong_fields_are_named_before_any_work(http, fields, param):
    error = error_of(http.embed(input="a", **fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert http.client.calls == []


FIELDS = [
    "model", "encoding_format", "output_dtype", "dimensions", "prompt_name", "prompt", "input_type", "truncate",
    "truncate_prompt_tokens", "truncation_side", "normalize", "add_special_tokens", "user", "priority", "request_id",
    "messages", "chat_template", "late_chunking", "embedding_types", "unknown",
]  # fmt: skip


def test_null_means_absent(http):
    expected = vectors_of(http.embed(input="a red"))
    response = http.embed(input="a red", **dict.fromkeys(FIELDS))
    np.testing.assert_array_equal(vectors_of(response), expected)


def test_unknown_fields_are_ignored(http):
    extra = {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "foo": {"bar": [1, None]},
        "late_chunking": False,
    }
    assert http.embed(input="a", user="u1", **extra).status_code == 200


def test_dimensions(http):
    full = vectors_of(http.embed(input="a"))[0]
    for width in (1, 8, 16):
        cut = vectors_of(http.embed(input="a", dimensions=width))[0]
        np.testing.assert_allclose(cut, full[:width] / np.linalg.norm(full[:width]), atol=1e-6)


def test_strict_dimensions():
    client = StubClient(card(embedding={"matryoshka": (4, 8)}))
    http = Http({"stub": client, "plain": StubClient()}, strict_dimensions=True)
    assert http.embed(model="stub", input="a", dimensions=8).status_code == 200
    assert http.embed(model="stub", input="a", dimensions=16).status_code == 200
    assert "4, 8, 16" in error_of(http.embed(model="stub", input="a", dimensions=5))["message"]
    assert error_of(http.embed(model="plain", input="a", dimensions=8))["param"] == "dimensions"


def test_different_dimensions_at_one_time(http):
    sizes = [8, 4, None, 16, 1]
    requests = [
        ("POST", "/v1/embeddings", {"json": {"input": "a", "dimensions": size}}) for size in sizes
    ]
    answers = [vectors_of(response).shape[1] for response in http.gather(*requests)]
    assert answers == [size or 16 for size in sizes]


def test_options_reach_the_engine(http):
    fields = {"normalize": False, "priority": "bulk", "request_id": "mine-1"}
    response = http.embed(input="a", **fields)
    call = http.client.calls[-1]
    assert (call["options"].normalize, call["priority"], call["trace"]) == (False, "bulk", "mine-1")
    assert response.headers["x-request-id"] == "mine-1"


def test_large_answers_keep_their_order(http):
    texts = [" ".join(["red"] * (i % 29)) for i in range(2048)]
    got = vectors_of(http.embed(input=texts))
    assert got.shape == (2048, 16)
    lengths = {i: vector([CLS] + [RED] * i + [SEP], 16) for i in range(29)}
    np.testing.assert_allclose(got, [lengths[i % 29] for i in range(2048)], atol=1e-6)


# Prompts

PROMPTS = {"query": "query : ", "document": "document : ", "long": "a " * 40}
QUERY_IDS = [CLS, 14, 16, RED, SEP]
DOCUMENT_IDS = [CLS, 15, 16, RED, SEP]
PLAIN_IDS = [CLS, RED, SEP]


@pytest.mark.parametrize(
    ("fields", "default", "expected"),
    [
        ({}, None, PLAIN_IDS),
        ({}, "query", QUERY_IDS),
        ({"prompt": ""}, "query", PLAIN_IDS),
        ({"prompt": "document : "}, "query", DOCUMENT_IDS),
        ({"prompt_name": "query"}, None, QUERY_IDS),
        ({"prompt_name": "document"}, "query", DOCUMENT_IDS),
        ({"input_type": "query"}, None, QUERY_IDS),
        ({"input_type": "search_query"}, None, QUERY_IDS),
        ({"input_type": "document"}, None, DOCUMENT_IDS),
        ({"input_type": "search_document"}, None, DOCUMENT_IDS),
        ({"input_type": "passage"}, None, DOCUMENT_IDS),
    ],
)
def test_prompts(fields, default, expected):
    http = served(embedding={"prompts": PROMPTS, "default_prompt_name": default})
    response = http.embed(input="red", **fields)
    assert ids_of(http) == [expected]
    assert response.json()["usage"]["prompt_tokens"] == len(expected)
    assert http.client.calls[-1]["pool_from"] == 0


def test_roles_of_a_model_without_prompts_change_nothing(http):
    for kind in ("query", "document", "search_query", "search_document", "passage"):
        assert http.embed(input="red", input_type=kind).status_code == 200
        assert ids_of(http) == [PLAIN_IDS]


def test_unknown_prompts_list_the_known():
    http = served(embedding={"prompts": PROMPTS})
    for field in ("prompt_name", "input_type"):
        error = error_of(http.embed(input="red", **{field: "quary"}))
        assert error["param"] == field
        assert "'document', 'long', 'query'" in error["message"]
    assert (
        error_of(http.embed(input="red", prompt="x", prompt_name="query"))["param"] == "prompt_name"
    )
    assert (
        error_of(http.embed(input="red", prompt_name="query", input_type="document"))["param"]
        == "input_type"
    )


def test_prompts_do_not_go_with_token_ids():
    http = served(embedding={"prompts": PROMPTS, "default_prompt_name": "query"})
    assert http.embed(input=[[5]]).status_code == 200
    assert ids_of(http) == [[5]]
    assert error_of(http.embed(input=[[5]], prompt_name="query"))["param"] == "prompt_name"


def test_pooling_may_leave_the_prompt_out():
    http = served(embedding={"prompts": PROMPTS, "pools_prompt": False})
    http.embed(input=["red", ""], prompt_name="query")
    assert http.client.calls[-1]["pool_from"] == 3
    http.embed(input="red", prompt_name="query", add_special_tokens=False)
    assert http.client.calls[-1]["pool_from"] == 2
    http.embed(input="red")
    assert http.client.calls[-1]["pool_from"] == 0
    error = error_of(http.embed(input="", prompt_name="query", add_special_tokens=False))
    assert error["param"] == "input"


# Too long


def test_too_long_is_refused_or_cut(http):
    text = "red " * 40
    error = error_of(http.embed(input=["a", text]))
    assert error["param"] == "input[1]"
    assert error["code"] == "context_length_exceeded"
    assert "42 tokens; the limit is 32" in error["message"]
    response = http.embed(input=["a", text], truncate=True)
    assert ids_of(http) == [[CLS, A, SEP], [CLS] + [RED] * 30 + [SEP]]
    assert response.json()["usage"] == {
        "prompt_tokens": 35,
        "total_tokens": 35,
        "truncated_tokens": 10,
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 4}, [CLS, A, RED, SEP]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [CLS, 8, 9, SEP]),
        ({"truncate_prompt_tokens": 4, "truncate": "START"}, [CLS, 8, 9, SEP]),
        ({"truncate_prompt_tokens": 4, "truncate": "END"}, [CLS, A, RED, SEP]),
        ({"truncate_prompt_tokens": 4, "add_special_tokens": False}, [A, RED, KITE, 8]),
        ({"truncate_prompt_tokens": -1}, [CLS, A, RED, KITE, 8, 9, SEP]),
        ({"add_special_tokens": False}, [A, RED, KITE, 8, 9]),
        ({"truncate": "NONE"}, [CLS, A, RED, KITE, 8, 9, SEP]),
    ],
)
def test_truncation(http, fields, expected):
    response = http.embed(input="a red kite over the", **fields)
    assert response.status_code == 200, response.text
    assert ids_of(http) == [expected]


def test_truncation_keeps_the_prompt_on_the_left():
    http = served(embedding={"prompts": PROMPTS, "pools_prompt": False})
    fields = {"prompt_name": "query", "truncation_side": "left"}
    http.embed(input="a red kite over", truncate_prompt_tokens=6, **fields)
    assert ids_of(http) == [[CLS, 14, 16, KITE, 8, SEP]]
    assert (
        error_of(http.embed(input="a", truncate_prompt_tokens=4, **fields))["param"]
        == "truncate_prompt_tokens"
    )
    assert error_of(http.embed(input="a", prompt_name="long", truncate=True))["param"] == "truncate"


def test_truncation_of_token_ids(http):
    ids = [CLS, *range(5, 45), SEP]
    assert error_of(http.embed(input=ids))["param"] == "input"
    assert error_of(http.embed(input=[[5], ids]))["param"] == "input[1]"
    response = http.embed(input=[ids], truncate=True)
    assert ids_of(http) == [[CLS, *range(5, 35), SEP]]
    assert response.json()["usage"]["truncated_tokens"] == 10
    http.embed(input=[5, 6, 7], truncate_prompt_tokens=1)
    assert ids_of(http) == [[5]]


def test_the_server_can_cut_by_default():
    http = Http(truncate=True)
    assert http.embed(input="red " * 40).json()["usage"]["truncated_tokens"] == 10
    assert error_of(http.embed(input="red " * 40, truncate=False))["param"] == "input"


def test_a_huge_text_is_refused_early_and_cut_exactly(http):
    text = "red kite over the hill " * 50_000
    assert "more than 64 tokens" in error_of(http.embed(input=text))["message"]
    response = http.embed(input=text, truncate=True)
    assert ids_of(http)[0][:3] == [CLS, RED, KITE]
    assert response.json()["usage"] == {
        "prompt_tokens": 32,
        "total_tokens": 32,
        "truncated_tokens": 249_970,
    }
    assert http.embed(input=" " * 500_000).status_code == 200


# Conversations


def test_messages():
    http = served(tokenizer={"chat_templates": {"default": TEMPLATE}})
    parts = [{"type": "text", "text": "red "}, {"type": "text", "text": "kite"}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": parts},
    ]
    assert http.embed(messages=messages).status_code == 200
    assert ids_of(http) == [[A, RED, KITE]]
    http.embed(messages=messages, add_special_tokens=True, add_generation_prompt=True)
    assert ids_of(http) == [[CLS, A, RED, KITE, 19, SEP]]


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "empty"),
        ([{"role": "system", "content": "a"}], "messages", "No system here"),
        ([{"role": "king", "content": "a"}], "messages[0].role", "king"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0]",
            "only text",
        ),
        ("a", "messages", "got string"),
    ],
)
def test_wrong_messages(messages, param, words):
    http = served(tokenizer={"chat_templates": {"default": TEMPLATE}})
    error = error_of(http.embed(messages=messages))
    assert (error["param"], words in error["message"]) == (param, True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ nothing.here.at.all }}",
        "{{ 1 / 0 }}",
        "{% broken",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ messages | nofilter }}",
        "{{ 'a' * 99999999 * 99 }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault(template):
    http = served(tokenizer={"chat_templates": {"default": template}})
    assert error_of(http.embed(messages=[{"role": "user", "content": "a"}]))["param"] == "messages"


def test_no_template(http):
    error = error_of(http.embed(messages=[{"role": "user", "content": "a"}]))
    assert "no chat template" in error["message"]


def test_template_variables():
    http = served(tokenizer={"chat_templates": {"default": "{{ word }} {{ sep_token }}"}})
    messages = [{"role": "user", "content": "a"}]
    http.embed(messages=messages, chat_template_kwargs={"word": "kite"})
    assert ids_of(http) == [[KITE, SEP]]
    error = error_of(http.embed(messages=messages, chat_template_kwargs={"messages": []}))
    assert error["param"] == "chat_template_kwargs"


# The engine fails


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("bad_request", 400),
        ("overloaded", 429),
        ("deadline", 504),
        ("non_finite", 500),
        ("internal", 500),
        ("unavailable", 503),
    ],
)
def test_engine_errors(http, kind, status):
    http.client.failure = EngineError(kind, "because", "input[0]")
    response = http.embed(input="a")
    error = error_of(response, status)
    assert (error["message"], error["param"], error["code"]) == ("because", "input[0]", kind)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    http.client.failure = None
    assert http.embed(input="a").status_code == 200


def test_a_vector_that_is_not_finite_is_an_error_of_its_text(http):
    http.client.spoil = 1
    error = error_of(http.embed(input=["a", "red"]), 500)
    assert (error["param"], error["code"]) == ("input[1]", "non_finite")
    assert (
        error_of(http.embed(input=["a", "red"], encoding_format="base64"), 500)["code"]
        == "non_finite"
    )


def test_a_fault_of_ours_is_a_500_that_tells_nothing(http, caplog):
    http.client.failure = ZeroDivisionError("secret")
    assert "secret" not in error_of(http.embed(input="a"), 500)["message"]
    assert "secret" in caplog.text


def test_deadline():
    http = Http(request_timeout_s=0.05)
    http.client.delay_s = 5
    assert error_of(http.embed(input="a"), 504)["code"] == "deadline"
    assert (http.client.running, http.client.cancelled) == (0, 1)


# Anything at all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
WORDS = st.sampled_from(
    ["a", "red kite", "", "query", "base64", "float", "int8", "left", "bulk", "NONE"]
)
VALUES = JSON | WORDS | st.lists(WORDS | st.integers(-2, 70), max_size=5) | st.integers(-2, 40)
BODIES = st.dictionaries(st.sampled_from([*FIELDS, "input"]), VALUES, max_size=6)


def no_fault_of_ours(response):
    assert response.status_code in (200, 400, 404)

    def refuse(word):
        raise AssertionError(word)

    body = json.loads(response.content, parse_constant=refuse)
    if response.status_code == 200:
        for item in body["data"]:
            assert isinstance(item["embedding"], str) or all(map(math.isfinite, item["embedding"]))
    else:
        error_of(response, response.status_code)


@given(body=BODIES, text=WORDS)
@settings(max_examples=150, deadline=None)
def test_fuzzed_fields_are_never_a_fault_of_ours(body, text):
    http = served(
        embedding={"prompts": PROMPTS}, tokenizer={"chat_templates": {"default": TEMPLATE}}
    )
    body = {"input": text, **body}
    raw = json.dumps(body, allow_nan=True).encode()
    no_fault_of_ours(http.post("/v1/embeddings", raw))


@given(
    raw=st.binary(max_size=80)
    | st.text(max_size=80).map(lambda text: text.encode(errors="surrogatepass"))
)
@settings(max_examples=60, deadline=None)
def test_fuzzed_bytes_are_never_a_fault_of_ours(raw):
    for path in ("/v1/embeddings", "/tokenize", "/detokenize"):
        assert Http().post(path, raw).status_code == 400


# Where the work is done


@pytest.mark.parametrize(
    ("body", "in_thread"),
    [
        ({"input": "a red kite"}, False),
        ({"input": [A, RED]}, True),
        ({"input": ["a"] * 2}, True),
        ({"input": "a " * 600}, True),
        ({"input": "a", "prompt": "red " * 300}, True),
        ({"messages": [{"role": "user", "content": "a"}]}, True),
    ],
)
def test_one_short_text_alone_is_tokenised_on_the_event_loop(http, monkeypatch, body, in_thread):
    threads = []

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        return prepare(*arguments)

    monkeypatch.setattr("rose.serving.gateway.routes.embeddings.prepare", noted)
    http.post("/v1/embeddings", {"truncate": True, **body})
    assert [name.startswith("rose-text") for name in threads] == [in_thread]
