"""The guard in front of the JSON parser: what it refuses, and that it never falls over."""

import contextlib
import json
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.serving.gateway.errors import ApiError
from rose.serving.gateway.json_guard import MAX_DEPTH, check_structure, decode
from rose.serving.gateway.schemas import EmbeddingRequest

DECODER = msgspec.json.Decoder(EmbeddingRequest)


def refusal(body):
    with pytest.raises(ApiError) as caught:
        decode(body, DECODER)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 20_000 + b"]" * 20_000,
        b'{"zzz":' + b'{"a":' * 1000 + b"1" + b"}" * 1001,
        b'{"tools":[{"parameters":' + b"[" * 1000 + b"]" * 1000 + b"}]}",
        b'{"input":"x","t":NaN}',
        b'{"input":"x","t":-Infinity}',
        b'{"input":"x","dimensions":1e999}',
        b'{"input":"x","zzz":[1,-1.5E+999]}',
        b'{"zzz":1e99999999999999999999,"input":"x"}',
        b'{"input":"x","dimensions":' + b"9" * 5000 + b"}",
        b'{"input":[' + b"9" * 5000 + b"]}",
        b'{"input": "x"',
        b"",
        b" ",
        b"[]",
        b"null",
        b'"text"',
        b"12",
        b'{"input":"a","input":"b"}',
        b'{"input":"a","inp\\u0075t":"b"}',
        b'{"input":"a"} x',
        b'{"input":"a\x01"}',
        b"\xef\xbb\xbf{}",
        b'{"input":"a',
        b'{"a\\u":1}',
        b'{"a\\ud83d":1}',
    ],
)
def test_refuses(body):
    refusal(body)


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        (b'{"input":"x","dimensions":6.0}', "dimensions", 6),
        (b'{"input":"x","dimensions":1e1}', "dimensions", 10),
        (b'{"input":[5.0,6]}', "input", [5, 6]),
        (b'{"input":[[5,6.0],[7.0]],"dimensions":8.0}', "input", [[5, 6], [7]]),
        (
            b'{"dimensions":6.0,"chat_template_kwargs":{"a":1.0}}',
            "chat_template_kwargs",
            {"a": 1.0},
        ),
    ],
)
def test_whole_numbers_are_integers(body, field, value):
    found = getattr(decode(body, DECODER), field)
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"input":"x","dimensions":6.5}', "dimensions"),
        (b'{"input":"x","dimensions":0.0}', "dimensions"),
        (b'{"input":"x","dimensions":1e300}', "dimensions"),
        (b'{"input":[5.0,6.5]}', "input[1]"),
        (b'{"input":["x",6.5]}', "input[1]"),
        (b'{"input":6.0}', "input"),
        (b'{"dimensions":6.0,"model":3.0}', "model"),
        (b'{"dimensions":6.0,"zzz":"\\ud83d"}', None),
    ],
)
def test_other_numbers_are_no_integers(body, param):
    assert refusal(body).param == param


@pytest.mark.parametrize("field", ["input", "user", "unknown", "model"])
@pytest.mark.parametrize(
    "text",
    [
        b"bad \\ud83d end",
        b"\\ud83d",
        b"\\ude00\\ud83d",
        b"\\ud83d\\u0041",
        b"\xff",
        b"\xed\xa0\xbd",
    ],
)
def test_no_half_characters_in_any_field(field, text):
    refusal(b'{"input":"x","' + field.encode() + b"_" * (field == "input") + b'":"' + text + b'"}')


def test_large_numbers_in_range_pass():
    body = b'{"input":"x","zzz":[1e308,1E+0005,-1.5e-999,0e999,"1e999"]}'
    assert decode(body, DECODER).input == "x"


def test_whole_pairs_are_one_character():
    assert decode(rb'{"input":"\ud83e\udd99"}', DECODER).input == "🦙"


def test_depth_limit_is_exact():
    def nested(levels):
        return b'{"zzz":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    decode(nested(MAX_DEPTH), DECODER)
    assert "nested" in refusal(nested(MAX_DEPTH + 1)).message


def test_brackets_and_keys_inside_strings_do_not_count():
    body = json.dumps({"input": "[{" * 500 + '"a": "a": \\', "user": '"user":'}).encode()
    assert decode(body, DECODER).input.startswith("[{[{")


def test_the_same_key_in_two_objects_is_no_duplicate():
    body = b'{"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}],"user":"c"}'
    assert len(decode(body, DECODER).messages) == 2
    error = refusal(b'{"messages":[{"role":"user","role":"tool"}]}')
    assert error.param == "role"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"dimensions":"64"}', "dimensions", "expected integer or null, got string"),
        (b'{"dimensions":0}', "dimensions", ">= 1"),
        (b'{"dimensions":true}', "dimensions", "got boolean"),
        (b'{"encoding_format":"hex"}', "encoding_format", "'base64'"),
        (b'{"input":[[101,"red"]]}', "input[0][1]", "got string"),
        (b'{"input":["a",null]}', "input[1]", "got null"),
        (b'{"messages":[{"role":"user","content":3}]}', "messages[0].content", "got integer"),
        (b'{"messages":[{"content":"a"}]}', "messages[0]", "role"),
        (b"[]", None, "expected object, got array"),
    ],
)
def test_names_the_field(body, param, words):
    error = refusal(body)
    assert error.param == param
    assert words in error.message


def test_large_bodies_are_checked_at_memory_speed():
    text = b'{"input":"' + b"word " * 4_000_000 + b'"}'
    ids = b'{"input":[' + b"12," * 6_000_000 + b"12]}"
    numbers = b'{"zzz":[true,1e+' + b"9,1.25e-300," * 400_000 + b"1" * 8_000_000 + b"]}"
    for body in (text, ids, numbers):
        started = time.process_time()
        check_structure(body)
        assert time.process_time() - started < 1.0


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(TREES, st.booleans())
@settings(max_examples=150, deadline=None)
def test_accepts_what_a_strict_encoder_writes(tree, ascii_only):
    text = json.dumps(tree, ensure_ascii=ascii_only)
    try:
        body = text.encode()
    except UnicodeEncodeError:  # hypothesis draws lone surrogates too
        return
    check_structure(body)


@given(st.lists(st.text(alphabet='ab\\"{}[]:, ', max_size=4), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_finds_duplicates_as_an_oracle_does(keys):
    body = ("{" + ",".join(f"{json.dumps(key)}:{json.dumps(key)}" for key in keys) + "}").encode()
    if len(set(keys)) == len(keys):
        check_structure(body)
    else:
        with pytest.raises(ApiError, match="twice"):
            check_structure(body)


@given(
    st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u d83e0a1\n', max_size=60).map(str.encode)
)
@settings(max_examples=400, deadline=None)
def test_raises_nothing_but_its_own_error(body):
    with contextlib.suppress(ApiError):
        decode(body, DECODER)
