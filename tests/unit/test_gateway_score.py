"""POST /v1/score: pairs, against a stub engine."""

import pytest

from tests.unit.gateway_stub import Http, StubClient, card, error_of
from tests.unit.test_gateway_rerank import KITE, RED, A, ranker, serve, sigmoid


@pytest.fixture
def http():
    return serve(ranker())


def ids_of(http):
    return [row.tolist() for row in http.client.calls[-1]["ids"]]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(("first", "second"), [("text_1", "text_2"), ("queries", "documents")])
def test_one_text_with_each_of_others(http, path, first, second):
    answer = http.post(path, {"model": "stub", first: "a", second: ["kite", "red", "a"]})
    assert answer.status_code == 200
    body = answer.json()
    assert [item["score"] for item in body["data"]] == pytest.approx(
        [sigmoid(-0.5), sigmoid(1), 0.5]
    )
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert all(item["object"] == "score" for item in body["data"])
    assert (body["object"], body["model"]) == ("list", "stub")
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert body["id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "red", [[A, RED]]),
        (["a"], "red", [[A, RED]]),
        ("a", ["red"], [[A, RED]]),
        (["a"], ["red", "kite"], [[A, RED], [A, KITE]]),
        (["a", "red"], ["red", "kite"], [[A, RED], [RED, KITE]]),
        ({"text": "a"}, [{"text": "red"}, "kite"], [[A, RED], [A, KITE]]),
        ("a", {"text": "red"}, [[A, RED]]),
    ],
)
def test_shapes(http, first, second, pairs):
    assert http.post("/v1/score", {"text_1": first, "text_2": second}).status_code == 200
    assert ids_of(http) == pairs


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_2": "a"}, "text_1"),
        ({"text_1": None, "text_2": "a"}, "text_1"),
        ({"text_1": [], "text_2": ["a"]}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ({"queries": ["a", "b", "c"], "documents": ["a", "b"]}, "queries"),
        ({"text_1": "a", "queries": "a", "text_2": "b"}, "queries"),
        ({"text_1": "a", "text_2": "b", "documents": ["b"]}, "documents"),
        ({"text_1": "a", "text_2": ["b", None]}, "text_2[1]"),
        ({"text_1": "a", "text_2": ["b", 1]}, "text_2[1]"),
        ({"text_1": 3, "text_2": ["b"]}, "text_1"),
        ({"text_1": ["a", ["b"]], "text_2": ["b", "c"]}, "text_1[1]"),
        ({"text_1": {"txt": "a"}, "text_2": ["b"]}, "text_1"),
        ({"text_1": "a", "text_2": ["a", "red " * 40]}, "text_2[1]"),
        ({"text_1": ["a", "red " * 40], "text_2": ["a", "a"]}, "text_1[1]"),
        ({"text_1": "a", "text_2": "b", "raw_scores": "yes"}, "raw_scores"),
        ({"text_1": "", "text_2": ["a", ""]}, "text_2[1]"),
    ],
)
def test_what_is_wrong_is_named(http, body, param):
    assert error_of(http.post("/v1/score", body))["param"] == param
    assert http.client.calls == []


def test_the_numbers_of_a_mismatch_are_told(http):
    answer = http.post("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    message = error_of(answer)["message"]
    assert "2 texts" in message
    assert "3 to pair" in message


def test_raw_scores(http):
    answer = http.post("/v1/score", {"text_1": "a", "text_2": ["red"], "raw_scores": True})
    assert answer.json()["data"][0]["score"] == 1.0


def test_truncation_is_reported(http):
    body = {"text_1": "a", "text_2": ["red " * 40], "truncate": True}
    usage = http.post("/v1/score", body).json()["usage"]
    assert usage == {"prompt_tokens": 32, "total_tokens": 32, "truncated_tokens": 9}


def test_a_classifier_and_an_embedder_are_refused():
    classifier = ranker("c", tasks=("classify",), scoring={"labels": ("x", "y")})
    http = Http({"c": classifier, "e": StubClient(card("e"))})
    for name in ("c", "e"):
        answer = http.post("/v1/score", {"model": name, "text_1": "a", "text_2": "b"})
        assert error_of(answer)["param"] == "model"


def test_cosines_of_pairs():
    http = Http(rank_by_cosine=True)
    body = {"text_1": ["a red", "kite"], "text_2": ["a red", "hill"]}
    scores = [item["score"] for item in http.post("/v1/score", body).json()["data"]]
    assert scores[0] == pytest.approx(1, abs=1e-6)
    assert -1 <= scores[1] < 0.99


def test_numbers_that_are_not_finite_fail_their_pair(http):
    http.client.spoil = 1
    answer = http.post("/v1/score", {"text_1": "a", "text_2": ["a", "red"]})
    assert error_of(answer, 500)["param"] == "text_2[1]"
