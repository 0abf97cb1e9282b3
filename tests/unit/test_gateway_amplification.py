"""Small requests that ask for much: a prompt is read once more with every text."""

import pytest

from rose.serving.gateway import truncation
from tests.unit.gateway_stub import Http, StubClient, card, error_of
from tests.unit.test_gateway_rerank import ranker

MANY = ["a"] * 50
LONG = "red " * 20_000


def requests_of(prompt, **fields):
    """Every way to put a prompt before texts: path and body."""
    both = {"prompt": prompt, **fields}
    return [
        ("/v1/embeddings", {"model": "e", "input": MANY, **both}),
        ("/v1/contextualizedembeddings", {"model": "e", "input": [["a"]] * 50, **both}),
        ("/v1/score", {"model": "r", "text_1": MANY, "text_2": MANY, **both}),
    ]


@pytest.fixture
def http():
    return Http({"e": StubClient(card("e")), "r": ranker("r")})


@pytest.mark.parametrize("truncate", [False, True])
def test_a_prompt_that_leaves_no_room_is_read_once(http, truncate):
    for path, body in requests_of(LONG, truncate=truncate):
        error = error_of(http.post(path, body))
        assert error["param"] == "prompt"
        assert error["code"] == "context_length_exceeded"
        assert "more than 64 tokens; the limit is 32" in error["message"]


def test_a_prompt_a_little_too_long_is_blamed_itself(http):
    for path, body in requests_of("red " * 40)[:2]:
        error = error_of(http.post(path, body))
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert "Special tokens and prompt take 42 tokens; the limit is 32" in error["message"]


def test_blanks_before_many_texts_are_not_multiplied(http, monkeypatch):
    """They are no tokens, so no limit of tokens meets them."""
    monkeypatch.setattr(truncation, "MAX_PROMPT_CHARS", 1000)
    for path, body in requests_of("red" + " " * 30):
        error = error_of(http.post(path, body))
        assert error["param"] == "prompt"
        assert "'prompt' of 33 characters before each of 50 texts" in error["message"]
    for path, body in requests_of("red "):
        assert http.post(path, body).status_code == 200
