"""What the tools that harm a server make of its answers."""

import json

import httpx
import numpy as np
import pytest

from tools.chaos import answered_by, judge_text, judge_vectors
from tools.generation import KnownText, Wish
from tools.load_test import Known

VECTORS = (np.eye(2, 3) + 0.1).astype(np.float32)
KNOWN = Known("m", 3, ["a", "b"], [[1], [2, 3]], VECTORS)
ERROR = {"error": {"message": "m", "type": "t", "param": None, "code": "unavailable"}}


def answer(status, content, name="one"):
    content = content if isinstance(content, str) else json.dumps(content)
    return httpx.Response(status, text=content, headers={"x-request-id": name})


def embedded(rows):
    data = [{"index": i, "embedding": row.tolist()} for i, row in enumerate(rows)]
    return {"data": data, "model": "m", "usage": {"prompt_tokens": 3}}


@pytest.mark.parametrize(
    ("given", "end", "fault"),
    [
        (answer(200, embedded(VECTORS)), "answered", None),
        (answer(200, embedded(VECTORS[::-1])), "wrong", "cosine"),
        (answer(200, embedded(VECTORS), name="two"), "wrong", "that of 'two'"),
        (answer(503, ERROR), "refused", None),
        (answer(503, "gone"), "refused", "not an OpenAI error"),
        (answer(500, ERROR), "wrong", "status 500"),
    ],
)
def test_how_a_request_for_vectors_ended(given, end, fault):
    found, why = judge_vectors(KNOWN, [0, 1], {}, given, "one")
    assert found == end
    assert why is None if fault is None else fault in why


def events(*datas):
    return "".join(f"data: {json.dumps(data)}\n\n" for data in datas)


def chunk(text, finish=None, **fields):
    return {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}], **fields}


USAGE = {"prompt_tokens": 2, "completion_tokens": 2}
WHOLE = events(chunk("ab"), chunk("c", "length", usage=USAGE)) + "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("text", "end", "fault"),
    [
        (WHOLE, "answered", None),
        (WHOLE.replace("ab", "ax"), "wrong", "does not begin"),
        (events(chunk("ab"), ERROR), "broken off", None),
        (events(chunk("ab"), {"error": "oh"}), "broken off", "not an OpenAI error"),
        (events(chunk("ab")), "wrong", "does not end with [DONE]"),
    ],
)
def test_how_a_stream_ended(text, end, fault):
    wish = Wish(KnownText("/v1/completions", {}, "abcd", 2), {"max_tokens": 2, "stream": True})
    found, why = judge_text(wish, answer(200, text), "one")
    assert found == end
    assert why is None if fault is None else fault in why


def test_only_the_answers_of_routes_under_load_are_counted():
    metrics = {
        'rose_requests_total{route="/v1/embeddings",status="200"}': 5.0,
        'rose_requests_total{route="/v1/chat/completions",status="503"}': 2.0,
        'rose_requests_total{route="/metrics",status="200"}': 90.0,
        'rose_request_seconds_count{route="/v1/embeddings"}': 7.0,
    }
    assert answered_by(metrics) == 7
