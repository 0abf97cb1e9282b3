"""The routes of text-embeddings-inference, against a stub engine."""

import numpy as np
import pytest

from rose.serving.client_api import EngineError
from tests.unit.gateway_stub import Http, StubClient, card, error_of

CLS, SEP, A, RED, KITE = 2, 3, 5, 6, 7


@pytest.fixture
def client():
    return StubClient(card())


@pytest.fixture
def served(client):
    http = Http({"stub": client})
    http.client = client
    return http


def openai_vectors(served, **fields):
    answer = served.post("/v1/embeddings", {"model": "stub", **fields}).json()
    return [item["embedding"] for item in answer["data"]]


@pytest.mark.parametrize(
    "inputs",
    ["a red", ["a red", "kite"], [CLS, RED, SEP], [[CLS, RED, SEP], [KITE]], ""],
)
def test_embed_answers_with_the_bare_vectors(served, inputs):
    answer = served.post("/embed", {"inputs": inputs})
    assert answer.status_code == 200
    assert answer.json() == openai_vectors(served, input=inputs, normalize=True)


def test_embed_options(served, client):
    options = {
        "normalize": False,
        "truncate": True,
        "truncation_direction": "Left",
        "dimensions": 4,
    }
    text = "kite " + "red " * 60
    answer = served.post("/embed", {"inputs": text, **options})
    assert np.shape(answer.json()) == (1, 4)
    assert client.calls[-1]["options"].normalize is False
    ids = client.calls[-1]["ids"][0].tolist()
    assert len(ids) == 32
    assert KITE not in ids


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": None}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a", [1]]}, "inputs[1]"),
        ({"inputs": [[1], []]}, "inputs[1]"),
        ({"inputs": [[64]]}, "inputs[0][0]"),
        ({"inputs": "red " * 99}, "inputs"),
        ({"inputs": 3}, "inputs"),
        ({"inputs": "a", "dimensions": 17}, "dimensions"),
        ({"inputs": "a", "dimensions": 0}, "dimensions"),
        ({"inputs": "a", "prompt_name": "nope"}, "prompt_name"),
        ({"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        ({"inputs": "a", "model": "nope"}, "model"),
    ],
)
def test_embed_names_what_is_wrong(served, body, param):
    answer = served.post("/embed", body)
    assert error_of(answer, 404 if param == "model" else 400)["param"] == param


def test_an_engines_error_is_named_as_the_route_names_it(served, client):
    client.failure = EngineError("non_finite", "NaN", "input[1]")
    answer = served.post("/embed", {"inputs": ["a", "red"]})
    assert error_of(answer, 500)["param"] == "inputs[1]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "red " * 60}),
        ("/embed", {"inputs": "red " * 60, "truncate": None}),
        ("/embed_all", {"inputs": "red " * 60}),
        ("/embed_sparse", {"inputs": "red " * 60}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["red " * 60]}}),
    ],
)
def test_what_says_nothing_is_cut_as_the_server_was_told(path, body):
    answer = Http(truncate=True).post(path, body)
    assert answer.status_code == 200, answer.text
    assert error_of(Http().post(path, body))["code"] == "context_length_exceeded"
    refused = {**body, "truncate": False, "parameters": {"truncate": False}}
    assert error_of(Http(truncate=True).post(path, refused))["code"] == "context_length_exceeded"


def test_similarity_is_the_cosine(served):
    texts = ["a red kite", "a red kite", "green"]
    body = {"inputs": {"source_sentence": texts[0], "sentences": texts[1:]}}
    found = served.post("/similarity", body).json()
    vectors = np.array(openai_vectors(served, input=texts, normalize=True))
    assert found == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-6)
    assert found[0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
        ({"inputs": {"source_sentence": "a"}}, "inputs"),
        (
            {"inputs": {"source_sentence": "red " * 99, "sentences": ["a"]}},
            "inputs.source_sentence",
        ),
        (
            {"inputs": {"source_sentence": "a", "sentences": ["a", "red " * 99]}},
            "inputs.sentences[1]",
        ),
        (
            {
                "inputs": {"source_sentence": "a", "sentences": ["a"]},
                "parameters": {"prompt_name": "x"},
            },
            "parameters.prompt_name",
        ),
    ],
)
def test_similarity_names_what_is_wrong(served, body, param):
    answer = served.post("/similarity", body)
    assert error_of(answer)["param"].startswith(param)


def test_decode(served):
    assert served.post("/decode", {"ids": [CLS, A, RED, SEP]}).json() == ["a red"]
    two = served.post("/decode", {"ids": [[A], [RED, KITE]]})
    assert two.json() == ["a", "red kite"]
    kept = served.post("/decode", {"ids": [CLS, A], "skip_special_tokens": False})
    assert kept.json() == ["[CLS] a"]


def test_similarity_names_its_sentences_where_they_are_too_many():
    body = {"inputs": {"source_sentence": "a", "sentences": ["a", "red"]}}
    error = error_of(Http(max_inputs=2).post("/similarity", body))
    assert error["param"] == "inputs.sentences"
    assert "'inputs.sentences'" in error["message"]


@pytest.mark.parametrize("ids", [[A] * 4, [[A, A], [A, A]]])
def test_decode_takes_no_end_of_ids(ids):
    http = Http(max_tokenize_chars=3)
    assert http.post("/decode", {"ids": ids[:1]}).status_code == 200
    assert error_of(http.post("/decode", {"ids": ids}))["param"] == "ids"


@pytest.mark.parametrize(
    ("ids", "param"),
    [([], "ids"), (None, "ids"), ([[1], 2], "ids[1]"), ([99], "ids[0]"), ([[99]], "ids[0][0]")],
)
def test_decode_names_what_is_wrong(served, ids, param):
    answer = served.post("/decode", {"ids": ids})
    assert error_of(answer)["param"] == param


def test_info(served):
    facts = served.get("/info").json()
    assert facts["model_id"] == "stub"
    assert facts["model_type"] == {"embedding": {"pooling": "mean"}}
    assert facts["max_input_length"] == 32
