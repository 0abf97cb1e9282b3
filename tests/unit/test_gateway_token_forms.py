"""Tokens of texts in the form of text-embeddings-inference: /tokenize and /embed_all."""

import threading

import numpy as np
import pytest

from rose.serving.client_api import EngineError
from rose.serving.gateway.embedding_output import check_finite
from tests.unit.gateway_stub import Http, StubClient, card, error_of, vector

CLS, SEP, A, RED, KITE = 2, 3, 5, 6, 7


@pytest.fixture
def client():
    facts = {"prompts": {"query": "query : "}}
    return StubClient(card(embedding=facts))


@pytest.fixture
def served(client):
    return Http({"stub": client}, max_inputs=4, max_tokenize_chars=1600)


def token(identity, text, start=None, stop=None):
    return {"id": identity, "text": text, "special": start is None, "start": start, "stop": stop}


@pytest.mark.parametrize("inputs", ["a  Red", ["a  Red"]])
def test_tokens_know_their_places(served, inputs):
    answer = served.post("/tokenize", {"inputs": inputs})
    assert answer.status_code == 200
    assert answer.json() == [
        [token(CLS, "[CLS]"), token(A, "a", 0, 1), token(RED, "Red", 3, 6), token(SEP, "[SEP]")]
    ]


def test_pieces_of_words_and_letters_of_several_bytes(served):
    answer = served.post("/tokenize", {"inputs": ["kites", "é a"], "add_special_tokens": False})
    kites, other = answer.json()
    assert [(t["text"], t["start"], t["stop"]) for t in kites] == [("kite", 0, 4), ("s", 4, 5)]
    assert [(t["text"], t["start"], t["stop"]) for t in other] == [("é", 0, 1), ("a", 2, 3)]


def test_a_prompt_is_a_part_of_the_text(served):
    (tokens,) = served.post("/tokenize", {"inputs": "kite", "prompt_name": "query"}).json()
    assert [t["text"] for t in tokens] == ["[CLS]", "query", ":", "kite", "[SEP]"]
    assert (tokens[3]["start"], tokens[3]["stop"]) == (8, 12)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a"] * 5}, "inputs"),
        ({"inputs": ["a" * 101, "b" * 100]}, "inputs"),
        ({"inputs": [1]}, "inputs[0]"),
        ({"inputs": "a", "prompt": "b"}, "inputs"),
        ({"inputs": "a", "text": "b"}, "inputs"),
        ({"inputs": "a", "prompt_name": "other"}, "prompt_name"),
    ],
)
def test_mistakes_name_their_field(served, body, param):
    assert error_of(served.post("/tokenize", body))["param"] == param


def test_embed_all_has_a_vector_for_each_token(served, client):
    answer = served.post("/embed_all", {"inputs": ["a red", "kite"]})
    assert answer.status_code == 200
    first, second = answer.json()
    for rows, ids in ((first, [CLS, A, RED, SEP]), (second, [CLS, KITE, SEP])):
        np.testing.assert_allclose(rows, [vector([i], 16) for i in ids], rtol=1e-6)
    assert [row.tolist() for row in client.calls[-1]["ids"]] == [
        [CLS, A, RED, SEP],
        [CLS, KITE, SEP],
    ]


def test_embed_all_of_one_text_cut_and_with_a_prompt(served, client):
    body = {"inputs": "kite " * 40, "truncate": True, "truncation_direction": "Right"}
    (rows,) = served.post("/embed_all", {**body, "prompt_name": "query"}).json()
    assert np.shape(rows) == (32, 16)
    assert client.calls[-1]["ids"][0][:3].tolist()[0] == CLS


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a", 3]}, "inputs[1]"),
        ({"inputs": "kite " * 40}, "inputs"),
        ({"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        ({"inputs": "a", "prompt_name": "other"}, "prompt_name"),
        ({"inputs": "a", "output": "multi_vector"}, "output"),
        ({"inputs": "a", "output": "other"}, "output"),
    ],
)
def test_embed_all_names_what_is_wrong(served, body, param):
    assert error_of(served.post("/embed_all", body))["param"] == param


def test_embed_all_refuses_more_numbers_than_an_answer_holds(client, monkeypatch):
    monkeypatch.setattr("rose.serving.gateway.routes.embeddings.MAX_NUMBERS_PER_TOKEN", 16 * 6)
    served = Http({"stub": client})
    assert served.post("/embed_all", {"inputs": ["a red", "kite"][:1]}).status_code == 200
    error = error_of(served.post("/embed_all", {"inputs": ["a red", "kite"]}))
    assert error["param"] == "inputs"
    assert "at most 6" in error["message"]


def test_embed_all_names_the_text_that_failed(served, client):
    client.spoil = 5
    error = error_of(served.post("/embed_all", {"inputs": ["a red", "kite"]}), 500)
    assert error["param"] == "inputs[1]"
    client.failure = EngineError("non_finite", "NaN", "input[1]")
    error = error_of(served.post("/embed_all", {"inputs": ["a red", "kite"]}), 500)
    assert error["param"] == "inputs[1]"


def test_shapes_that_clients_of_tei_send(served):
    """What LlamaIndex's TextEmbeddingsInference and langchain's endpoint embeddings post."""
    plain = served.post("/embed", {"inputs": ["a red", "kite"]}).json()
    assert served.post("/embed", {"inputs": ["a red", "kite"], "truncate": True}).json() == plain
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    body = {"inputs": ["a red", "kite"], "truncate": True, "parameters": {}}
    assert served.post("/embed", body, headers=headers).json() == plain


def test_embed_all_counts_what_a_row_has_and_not_what_vectors_are_cut_to(monkeypatch):
    monkeypatch.setattr("rose.serving.gateway.routes.embeddings.MAX_NUMBERS_PER_TOKEN", 16 * 6)
    served = Http({"stub": StubClient(card(embedding={"dimensions": 4, "hidden_size": 16}))})
    assert "at most 6" in error_of(served.post("/embed_all", {"inputs": "a " * 9}))["message"]


def test_large_answers_are_checked_off_the_event_loop(served, monkeypatch):
    module = "rose.serving.gateway.routes.embeddings"
    threads = []

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        check_finite(*arguments)

    monkeypatch.setattr(f"{module}.check_finite", noted)
    for limit in (4 * 16, 4 * 16 - 1):
        monkeypatch.setattr(f"{module}.CHECK_IN_THREAD_NUMBERS", limit)
        served.post("/embed_all", {"inputs": "a red"})  # four tokens
    assert [name.startswith("rose-text") for name in threads] == [False, True]
