"""POST /embed_sparse, and what a model without dense vectors answers elsewhere."""

import numpy as np
import pytest

from tests.unit.gateway_stub import Http, StubClient, card, error_of, vector

CLS, SEP, A, RED, KITE = 2, 3, 5, 6, 7


def served(**embedding):
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    model = card(embedding=embedding, tokenizer={"special_tokens": special})
    return Http({"stub": StubClient(model)})


def weight(token):
    return float(abs(vector([token], 16)[0]))


def test_tokens_of_the_text_with_their_weights():
    http = served()
    answer = http.post("/embed_sparse", {"inputs": ["red a red", "kite x"]})
    assert answer.status_code == 200, answer.text
    first, second = answer.json()
    assert [item["index"] for item in first] == [A, RED]  # once each, special tokens not
    assert [item["index"] for item in second] == [KITE]  # what is unknown says nothing
    for item in (*first, *second):
        assert item["value"] == pytest.approx(weight(item["index"]), rel=1e-6)


def test_the_largest_weight_of_a_token_counts(monkeypatch):
    http = served()
    rows = np.array([[9], [1], [3], [2], [0], [9]], np.float32)
    monkeypatch.setattr(StubClient, "_vectors", lambda *_: rows)
    (tokens,) = http.post("/embed_sparse", {"inputs": "a red a kite"}).json()
    assert tokens == [{"index": A, "value": 2.0}, {"index": RED, "value": 3.0}]


def test_weights_of_the_whole_vocabulary():
    http = served(outputs=("sparse",), dimensions=16, normalize=False)
    (tokens,) = http.post("/embed_sparse", {"inputs": "a red"}).json()
    expected = vector([CLS, A, RED, SEP], 16)
    assert [item["index"] for item in tokens] == list(range(16))
    np.testing.assert_allclose([item["value"] for item in tokens], expected, rtol=1e-6)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/similarity"])
def test_a_model_without_dense_vectors_says_so(path):
    http = served(outputs=("sparse",))
    body = {"inputs": {"source_sentence": "a", "sentences": ["red"]}, "input": "a"}
    body = body if path != "/embed" else {"inputs": "a"}
    error = error_of(http.post(path, body))
    assert error["param"] == "model"
    assert "/embed_sparse" in error["message"]


def test_a_model_without_sparse_vectors_says_so():
    error = error_of(served(outputs=("dense",)).post("/embed_sparse", {"inputs": "a"}))
    assert error["param"] == "model"


def test_too_many_texts_for_a_vocabulary(monkeypatch):
    monkeypatch.setattr("rose.serving.gateway.routes.embeddings.MAX_NUMBERS_SPARSE", 32)
    http = served(outputs=("sparse",))
    assert http.post("/embed_sparse", {"inputs": ["a", "red"]}).status_code == 200
    error = error_of(http.post("/embed_sparse", {"inputs": ["a", "red", "kite"]}))
    assert error["param"] == "inputs"
    assert "at most 2" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "inputs"), ({"inputs": []}, "inputs"), ({"inputs": "kite " * 40}, "inputs")],
)
def test_mistakes_name_their_field(body, param):
    assert error_of(served().post("/embed_sparse", body))["param"] == param
