"""Late interaction through the gateway: which tokens reach the engine, and what comes of scores."""

import threading

import numpy as np
import pytest

from rose.models.card import LateInteraction, QueryExpansion
from rose.serving.gateway.routes import vector_ranking
from rose.serving.gateway.token_vectors import maxsim, of_texts
from tests.unit.gateway_stub import Http, StubClient, card, error_of, vector

CLS, SEP, MASK, A, RED, KITE, COMMA = 2, 3, 4, 5, 6, 7, 17
Q, D = 40, 41
LATE = {
    "query_length": 8,
    "document_length": 10,
    "query_marker": Q,
    "document_marker": D,
    "expansion": QueryExpansion(token=MASK, length=8),
    "skip_ids": (COMMA,),
}


def served(http=None, embedding=(), tasks=("embed", "score"), **late):
    facts = {"outputs": ("multi_vector",), "late": LateInteraction(**{**LATE, **late})}
    model = card(embedding={**facts, **dict(embedding)}, tasks=tasks)
    client = StubClient(model)
    found = Http({"stub": client}, **(http or {}))
    found.client = client
    return found


def fed(http):
    return [row.tolist() for call in http.client.calls for row in call["ids"]]


def rows(ids):
    return [vector([token], 16) for token in ids]


def test_queries_are_marked_and_filled_up():
    http = served()
    answer = http.post("/embed_all", {"inputs": ["red kite", ""], "input_type": "query"})
    expected = [[CLS, Q, RED, KITE, SEP, MASK, MASK, MASK], [CLS, Q, SEP, *[MASK] * 5]]
    assert fed(http) == expected
    (call,) = http.client.calls
    assert (call["queries"], call["outputs"]) == (True, ("multi_vector",))
    for found, ids in zip(answer.json(), expected, strict=True):
        np.testing.assert_allclose(found, rows(ids), rtol=1e-6)


@pytest.mark.parametrize(
    "said", [{"input_type": "document"}, {"prompt_name": "document"}, {"input_type": "passage"}]
)
def test_documents_are_marked_and_lose_what_is_skipped(said):
    http = served()
    (found,) = http.post("/embed_all", {"inputs": "red, kite", **said}).json()
    assert fed(http) == [[CLS, D, RED, COMMA, KITE, SEP]]
    assert http.client.calls[0]["queries"] is False
    np.testing.assert_allclose(found, rows([CLS, D, RED, KITE, SEP]), rtol=1e-6)


def test_skipped_tokens_of_queries_count_unless_the_checkpoint_says_so():
    for sides, expected in ((("document",), 8), (("query", "document"), 7)):
        http = served(skip_sides=sides)
        (found,) = http.post("/embed_all", {"inputs": "red, kite", "input_type": "query"}).json()
        assert len(found) == expected


@pytest.mark.parametrize("fields", [{}, {"input_type": "haiku"}, {"prompt_name": "code"}])
def test_whether_a_text_is_a_query_has_to_be_said(fields):
    embedding = {"prompts": {"code": "a "}}
    for path, body in (
        ("/embed_all", {"inputs": "red", **fields}),
        ("/v1/embeddings", {"input": "red", "output_types": ["multi_vector"], **fields}),
    ):
        error = error_of(served(embedding=embedding).post(path, body))
        assert error["param"] == "input_type"
        assert "'query' or 'document'" in error["message"]


def test_fields_that_contradict_each_other_are_refused():
    http = served(embedding={"prompts": {"document": "a ", "code": "a "}})
    body = {"inputs": "red", "input_type": "query"}
    error = error_of(http.post("/embed_all", {**body, "prompt_name": "document"}))
    assert error["param"] == "prompt_name"
    assert "is for document texts, and these are query texts" in error["message"]
    both = {**body, "input_type": "passage", "prompt_name": "document"}
    for fits in (both, {**body, "prompt_name": "code"}):
        assert http.post("/embed_all", fits).status_code == 200
    ranked = {"query": "red", "documents": ["a"], "prompt_name": "document"}
    assert error_of(http.post("/v1/rerank", ranked))["param"] == "prompt_name"


def test_without_marker_and_expansion_a_prompt_may_mark():
    http = served(
        embedding={"prompts": {"query": "a "}}, query_marker=None, expansion=None, query_length=9
    )
    body = {"inputs": "red", "input_type": "query"}
    assert http.post("/embed_all", body).status_code == 200
    assert http.post("/embed_all", {**body, "inputs": "red " * 7}).status_code == 400
    other = {
        "input": "red",
        "input_type": "query",
        "prompt": "kite ",
        "output_types": ["multi_vector"],
    }
    assert http.post("/v1/embeddings", other).status_code == 200
    assert fed(http) == [[CLS, A, RED, SEP], [CLS, KITE, RED, SEP]]


def test_a_text_that_is_too_long_is_refused_by_the_length_of_its_side():
    http = served()
    for side, limit in (("query", 8), ("document", 10)):
        body = {"inputs": ["a", "red " * (limit - 2)], "input_type": side}
        error = error_of(http.post("/embed_all", body))
        assert error["param"] == "inputs[1]"
        assert f"the limit is {limit}" in error["message"]
        fits = {"inputs": "red " * (limit - 3), "input_type": side}
        assert http.post("/embed_all", fits).status_code == 200


@pytest.mark.parametrize("direction", ["Left", "Right"])
def test_a_cut_keeps_the_marker(direction):
    http = served()
    body = {"inputs": "a red " * 9 + "kite", "truncate": True, "truncation_direction": direction}
    http.post("/embed_all", {**body, "input_type": "query"})
    kept = [A, RED, A, RED, A] if direction == "Right" else [RED, A, RED, A, RED, KITE][-5:]
    assert fed(http) == [[CLS, Q, *kept, SEP]]


def test_token_ids_are_a_whole_text():
    http = served()
    body = {"input": [[CLS, Q, RED, SEP, MASK]], "output_types": ["multi_vector"]}
    assert error_of(http.post("/v1/embeddings", body))["param"] == "input_type"
    answer = http.post("/v1/embeddings", {**body, "input_type": "query"})
    (entry,) = answer.json()["data"]
    assert fed(http) == [[CLS, Q, RED, SEP, MASK]]
    assert http.client.calls[0]["queries"]
    assert len(entry["multi_vector_embedding"]) == 5
    assert answer.json()["usage"]["prompt_tokens"] == 5


def test_conversations_and_dense_vectors_are_refused():
    http = served()
    body = {"messages": [{"role": "user", "content": "red"}], "output_types": ["multi_vector"]}
    assert error_of(http.post("/v1/embeddings", body))["param"] == "messages"
    for path, body in (("/v1/embeddings", {"input": "red"}), ("/embed", {"inputs": "red"})):
        error = error_of(http.post(path, body))
        assert error["param"] == "model"
        assert "/embed_all" in error["message"]
    body = {"input": "red", "input_type": "query", "output_types": ["dense"]}
    assert "'stub' has 'multi_vector'" in error_of(http.post("/v1/embeddings", body))["message"]


def test_hidden_states_are_those_of_all_tokens():
    http = served()
    body = {"inputs": "red, kite", "input_type": "document", "output": "hidden_states"}
    (found,) = http.post("/embed_all", body).json()
    assert len(found) == 6
    assert http.client.calls[0]["outputs"] == ("hidden_states",)


def test_hidden_states_are_counted_by_their_own_width(monkeypatch):
    monkeypatch.setattr("rose.serving.gateway.routes.embeddings.MAX_NUMBERS_PER_TOKEN", 8 * 16)
    http = served(embedding={"hidden_size": 32})
    body = {"inputs": "red kite", "input_type": "document"}
    assert http.post("/embed_all", body).status_code == 200
    error = error_of(http.post("/embed_all", {**body, "output": "hidden_states"}))
    assert "'inputs' has 5 tokens; at most 4" in error["message"]


def test_a_model_says_what_it_can():
    (model,) = served().get("/v1/models").json()["data"]
    assert model["tasks"] == ["embed", "score"]
    assert model["output_types"] == ["multi_vector"]


def score(query, document):
    asked = np.array(rows([CLS, Q, *query, SEP, *[MASK] * (5 - len(query))]))
    found = np.array(rows([CLS, D, *(token for token in document if token != COMMA), SEP]))
    return (asked @ found.T).max(axis=1).sum()


TEXTS = {"red, kite": [RED, COMMA, KITE], "a": [A], "kite kite": [KITE, KITE], "": []}


@pytest.mark.parametrize("tasks", [("embed", "score"), ("score",)])
@pytest.mark.parametrize("numbers", [1 << 23, 2 * 16 * 10])
def test_documents_are_ranked_by_their_best_matches(monkeypatch, numbers, tasks):
    monkeypatch.setattr(vector_ranking, "MAX_NUMBERS_PER_TOKEN", numbers)
    http = served(tasks=tasks)
    answer = http.post("/v1/rerank", {"query": "red", "documents": list(TEXTS)}).json()
    found = {item["index"]: item["relevance_score"] for item in answer["results"]}
    expected = [score([RED], ids) for ids in TEXTS.values()]
    np.testing.assert_allclose([found[i] for i in range(len(TEXTS))], expected, rtol=1e-5)
    order = np.argsort(-np.array(expected), kind="stable").tolist()
    assert [item["index"] for item in answer["results"]] == order
    assert answer["usage"]["prompt_tokens"] == 8 + 6 + 4 + 5 + 3
    assert len(http.client.calls) == (2 if numbers > 1000 else 3)


def test_queries_of_their_own_and_the_form_of_tei():
    http = served()
    body = {"text_1": ["red", "a"], "text_2": ["red, kite", "kite"]}
    found = [item["score"] for item in http.post("/v1/score", body).json()["data"]]
    expected = [score([RED], [RED, KITE]), score([A], [KITE])]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    tei = http.post("/rerank", {"query": "red", "texts": ["red, kite", "kite"]}).json()
    scores = {item["index"]: item["score"] for item in tei}
    assert scores[0] == pytest.approx(expected[0], rel=1e-5)
    mean = served(mean=True).post("/rerank", {"query": "red", "texts": ["red, kite"]}).json()
    assert mean[0]["score"] == pytest.approx(expected[0] / 8, rel=1e-5)


def test_pairs_are_scored_in_parts_with_their_queries(monkeypatch):
    monkeypatch.setattr(vector_ranking, "MAX_NUMBERS_PER_TOKEN", 2 * 16 * (8 + 10))
    http = served()
    queries = {"red": [RED], "a": [A], "kite": [KITE], "kite red": [KITE, RED], "": []}
    documents = {**TEXTS, "a kite": [A, KITE]}
    body = {"text_1": list(queries), "text_2": list(documents)}
    answer = http.post("/v1/score", body).json()
    expected = [score(*ids) for ids in zip(queries.values(), documents.values(), strict=True)]
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, rtol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, fed(http)))
    called = [(call["queries"], len(call["ids"])) for call in http.client.calls]
    assert called == [(True, 2), (False, 2)] * 2 + [(True, 1), (False, 1)]
    long = {"text_1": ["red"] * 3, "text_2": ["a", "a", "red " * 9]}
    assert error_of(http.post("/v1/score", long))["param"] == "text_2[2]"


def test_vectors_of_tokens_are_cut_apart_off_the_event_loop(monkeypatch):
    threads = []

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        return of_texts(*arguments)

    monkeypatch.setattr("rose.serving.gateway.routes.embeddings.of_texts", noted)
    served().post("/v1/rerank", {"query": "red", "documents": ["a", "kite"]})
    assert len(threads) == 2
    assert all(name.startswith("rose-text") for name in threads)


def test_errors_of_ranking_name_the_text():
    http = served()
    long = {"query": "red", "documents": ["a", "red " * 9]}
    assert error_of(http.post("/v1/rerank", long))["param"] == "documents[1]"
    assert http.post("/v1/rerank", {**long, "truncate": True}).status_code == 200
    assert http.post("/v1/rerank", {**long, "max_tokens_per_doc": 5}).status_code == 200
    assert max(map(len, fed(http)[-2:])) == 5
    error = error_of(http.post("/v1/rerank", {**long, "query": "red " * 9, "documents": ["a"]}))
    assert error["param"] == "query"
    for name, value in (("instruction", "find"), ("max_chunks_per_doc", 3)):
        body = {"query": "red", "documents": ["a"], name: value}
        assert error_of(http.post("/v1/rerank", body))["param"] == name


def test_a_vector_that_is_not_finite_fails_its_text():
    http = served()
    http.client.spoil = 4  # the first document's second vector, and the query's fifth
    error = error_of(http.post("/v1/rerank", {"query": "red", "documents": ["a"]}), 500)
    assert (error["param"], error["code"]) == ("query", "non_finite")


def test_matches_are_summed():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((3, 4)).astype(np.float32)
    documents = [rng.standard_normal((n, 4)).astype(np.float32) for n in (2, 0, 5)]
    expected = [(query @ d.T).max(axis=1).sum() if len(d) else 0 for d in documents]
    np.testing.assert_allclose(maxsim([query], documents), expected, rtol=1e-6)
    np.testing.assert_allclose(maxsim([query] * 3, documents), expected, rtol=1e-6)
    found = maxsim([query], documents, mean=True)
    np.testing.assert_allclose(found, np.array(expected) / 3, rtol=1e-6)
    assert maxsim([query[:0]], documents).tolist() == [0, 0, 0]


def test_rows_of_texts():
    packed = np.arange(10.0).reshape(5, 2)
    ids = [np.array([1, 9], np.int32), np.array([9, 9, 2], np.int32)]
    late = LateInteraction(query_length=4, document_length=4, skip_ids=(9,))
    assert [len(part) for part in of_texts(packed, ids)] == [2, 3]
    assert [part.tolist() for part in of_texts(packed, ids, late)] == [[[0, 1]], [[8, 9]]]
    assert [len(part) for part in of_texts(packed, ids, late, "query")] == [2, 3]
