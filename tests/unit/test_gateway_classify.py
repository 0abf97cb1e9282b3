"""POST /v1/classify and TEI's /predict, against a stub engine."""

import numpy as np
import pytest

from rose.serving.gateway.operation import Call
from tests.unit.gateway_stub import Http, StubClient, card, error_of
from tests.unit.test_gateway_rerank import CLS, KITE, RED, SEP, A, ranker, serve

LABELS = ("contradiction", "entailment", "neutral")
RAW = [1.0, 3.0, -2.0]


def classifier(**scoring):
    facts = {"labels": LABELS, "activation": "identity", "probabilities": "softmax", **scoring}
    client = ranker(tasks=("classify",), scoring=facts)
    client.scorer = lambda ids: RAW if RED in ids else [2.0, 2.0, 1.0]
    return client


@pytest.fixture
def http():
    return serve(classifier())


def ids_of(http):
    return [row.tolist() for row in http.client.calls[-1]["ids"]]


def softmax(row):
    powers = np.exp(row)
    return powers / powers.sum()


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_labels_and_their_probabilities(http, path):
    answer = http.post(path, {"model": "stub", "input": ["red", "a"]})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["labels"] == list(LABELS)
    first, second = body["data"]
    assert (first["index"], first["label"], first["num_classes"]) == (0, "entailment", 3)
    assert first["probs"] == pytest.approx(softmax(RAW).tolist())
    assert first["score"] == pytest.approx(max(softmax(RAW)))
    assert second["label"] == "contradiction"  # the first of equals
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert ids_of(http) == [[CLS, RED, SEP], [CLS, A, SEP]]


def test_labels_that_do_not_exclude_each_other():
    http = serve(classifier(probabilities="sigmoid"))
    (item,) = http.post("/v1/classify", {"input": "red"}).json()["data"]
    assert item["probs"] == pytest.approx((1 / (1 + np.exp(-np.array(RAW)))).tolist())


def test_many_numbers_are_written_by_a_thread(http, monkeypatch):
    bodies = ({"input": ["red", "a"]}, {"inputs": [["red"], ["a"]]}, {"inputs": "red"})
    at_once = [http.post("/classify", body).json() for body in bodies]
    used = []
    in_thread = Call.in_thread
    monkeypatch.setattr(
        Call, "in_thread", lambda *a: (used.append(a[1].__name__), in_thread(*a))[1]
    )
    monkeypatch.setattr("rose.serving.gateway.routes.classify.ENCODE_IN_THREAD_NUMBERS", 0)
    for body, expected in zip(bodies, at_once, strict=True):
        answer = http.post("/classify", body).json()
        if isinstance(answer, dict):
            answer["id"] = expected["id"]
        assert answer == expected
    assert used.count("encode") == len(bodies)


def test_raw_scores(http):
    (item,) = http.post("/v1/classify", {"input": "red", "raw_scores": True}).json()["data"]
    assert item["probs"] == RAW


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("red", [[CLS, RED, SEP]]),
        (["red", "kite"], [[CLS, RED, SEP], [CLS, KITE, SEP]]),
        (["red", ["a", "kite"], "kite"], [[CLS, RED, SEP], [A, KITE], [CLS, KITE, SEP]]),
        ([["red"]], [[CLS, RED, SEP]]),
        ("", [[CLS, SEP]]),
    ],
)
def test_texts_and_pairs(http, value, expected):
    assert http.post("/v1/classify", {"input": value}).status_code == 200
    assert ids_of(http) == expected


def test_segments_of_texts_and_pairs():
    http = serve(classifier(segment_ids=True))
    http.post("/v1/classify", {"input": [["a", "red"], "kite"]})
    assert ids_of(http) == [[A, RED], [CLS, KITE, SEP]]
    assert [part.tolist() for part in http.client.calls[-1]["segments"]] == [[0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("inputs", "count", "is_list"),
    [
        ("red", 1, False),
        (["red"], 1, False),
        (["a", "red"], 1, False),  # a pair, as TEI reads it
        ([["red"], ["a"]], 2, True),
        ([["a", "red"], ["a"]], 2, True),
        ([["red"]], 1, True),
    ],
)
def test_the_form_of_tei(http, inputs, count, is_list):
    answer = http.post("/predict", {"inputs": inputs}).json()
    rows = answer if is_list else [answer]
    assert len(rows) == count == len(ids_of(http))
    assert [entry["label"] for entry in rows[0]] == ["entailment", "contradiction", "neutral"]
    assert [entry["score"] for entry in rows[0]] == pytest.approx(sorted(softmax(RAW))[::-1])
    raw = http.post("/predict", {"inputs": "red", "raw_scores": True}).json()
    assert raw[0] == {"score": 3.0, "label": "entailment"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"inputs": []}, "inputs"),
        ({"input": 3}, "input"),
        ({"input": ["a", None]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [["a", "b", "c"]]}, "input[0]"),
        ({"input": ["a", []]}, "input[1]"),
        ({"inputs": ["a", "b", "c"]}, "inputs"),
        ({"inputs": [["a"], []]}, "inputs[1]"),
        ({"input": "a", "inputs": "a"}, "inputs"),
        ({"input": ["a", "red " * 40]}, "input[1]"),
        ({"input": [["a", "red " * 40]]}, "input[0]"),
        ({"input": "a", "labels": ["good", "bad"]}, "labels"),
        ({"input": "a", "use_activation": False}, "use_activation"),
        ({"input": "a", "prompt_name": "x"}, "prompt_name"),
        ({"input": "a", "truncation_direction": "down"}, "truncation_direction"),
        ({"input": "a", "model": "nope"}, "model"),
    ],
)
def test_what_is_wrong_is_named(http, body, param):
    answer = http.post("/v1/classify", body)
    assert error_of(answer, 404 if param == "model" else 400)["param"] == param
    assert http.client.calls == []


def test_truncation_is_reported(http):
    long = "red " * 40
    answer = http.post("/v1/classify", {"input": [long, ["a", long]], "truncate": True}).json()
    assert answer["usage"]["truncated_tokens"] == 19
    assert [len(row) for row in ids_of(http)] == [32, 32]
    assert ids_of(http)[0][-1] == SEP


def test_prompts_go_before_the_text():
    http = serve(classifier(prompts={"is": "kite "}, default_prompt_name="is"))
    http.post("/v1/classify", {"input": ["red", ["a", "red"]]})
    assert ids_of(http) == [[CLS, KITE, RED, SEP], [KITE, A, RED]]


def test_only_classifiers_classify():
    http = Http({"ranker": ranker("ranker"), "embedder": StubClient(card("embedder"))})
    for name, can in (
        ("ranker", "score (/v1/rerank, /v1/score)"),
        ("embedder", "embed (/v1/embeddings)"),
    ):
        error = error_of(http.post("/v1/classify", {"model": name, "input": "a"}))
        assert error["message"] == f"The model '{name}' cannot classify texts; it can: {can}."


def test_too_many_texts():
    http = serve(classifier(), max_inputs=2)
    assert error_of(http.post("/v1/classify", {"input": ["a"] * 3}))["param"] == "input"


def test_numbers_that_are_not_finite_fail_their_text(http):
    http.client.spoil = 1
    assert (
        error_of(http.post("/predict", {"inputs": [["a"], ["red"]]}), 500)["param"] == "inputs[1]"
    )
