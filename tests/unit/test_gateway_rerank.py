"""POST /v1/rerank: every field, against a stub engine."""

import json

import msgspec
import numpy as np
import pytest

from rose.models.card import PairTemplate, ScoringCard
from rose.serving.client_api import EngineError
from rose.serving.gateway import pairs
from rose.serving.gateway.models import BY_COSINE
from rose.serving.gateway.routes import OPERATIONS
from tests.unit.gateway_stub import Http, StubClient, card, error_of, tokenizer_json

CLS, SEP, A, RED, KITE, QUERY = 2, 3, 5, 6, 7, 14
LONG = "red " * 40
TEMPLATE = PairTemplate(
    prefix="[ ",
    body="{instruction} query : {query} document : {document}",
    suffix=" ]",
    instruction="a fine text",
)


def scoring(**changes):
    facts = {
        "kind": "cross_encoder",
        "labels": ("LABEL_0",),
        "activation": "sigmoid",
        "probabilities": "sigmoid",
    }
    return ScoringCard(**{**facts, **changes})


def ranker(name="stub", **changes):
    source = changes.pop("source", None)
    facts = {"tasks": ("score",), "scoring": scoring(**changes.pop("scoring", {}))}
    client = StubClient(card(name, **{**facts, **changes}), source)
    client.scorer = lambda ids: [float(np.sum(ids == RED)) - float(np.sum(ids == KITE)) / 2]
    return client


def serve(client, **settings):
    http = Http({client.card.name: client}, **settings)
    http.client = client
    return http


@pytest.fixture
def http():
    return serve(ranker())


def rerank(http, path="/v1/rerank", **fields):
    return http.post(path, {"query": "a", "documents": ["a", "red"], **fields})


def order_of(answer):
    assert answer.status_code == 200, answer.text
    return [result["index"] for result in answer.json()["results"]]


def ids_of(http):
    return [row.tolist() for row in http.client.calls[-1]["ids"]]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# The answer


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_the_best_come_first_and_equal_ones_as_they_came(http, path):
    documents = ["kite", "red red", "a", "red", "fine", "red"]
    answer = rerank(http, path, model="stub", documents=documents)
    assert order_of(answer) == [1, 3, 5, 2, 4, 0]
    body = answer.json()
    assert body["model"] == "stub"
    assert body["id"] == answer.headers["x-request-id"]
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == pytest.approx([sigmoid(x) for x in (2, 1, 1, 0, 0, -0.5)])
    assert all(set(result) == {"index", "relevance_score"} for result in body["results"])
    tokens = sum(len(row) for row in ids_of(http))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert body["meta"] == {"tokens": {"input_tokens": tokens}}


def test_the_form_of_tei(http):
    answer = http.post("/rerank", {"query": "a", "texts": ["kite", "red"]})
    assert answer.json() == [
        {"index": 1, "score": pytest.approx(sigmoid(1))},
        {"index": 0, "score": pytest.approx(sigmoid(-0.5))},
    ]
    answer = http.post(
        "/v1/rerank",
        {"query": "a", "texts": ["kite", "red"], "return_text": True, "raw_scores": True},
    )
    assert answer.json() == [
        {"index": 1, "score": 1.0, "text": "red"},
        {"index": 0, "score": -0.5, "text": "kite"},
    ]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("sigmoid", sigmoid(0.5)), ("identity", 0.5), ("tanh", np.tanh(0.5))],
)
def test_activations(activation, expected):
    http = serve(ranker(scoring={"activation": activation}))
    http.client.scorer = lambda _: [0.5]
    answer = rerank(http, documents=["a"])
    assert answer.json()["results"][0]["relevance_score"] == pytest.approx(expected)
    raw = rerank(http, documents=["a"], raw_scores=True)
    assert raw.json()["results"][0]["relevance_score"] == 0.5


def test_great_scores_stay_apart_and_in_order(http):
    values = iter([12.1, 12.3, 40.0, 41.0, -50.0])
    http.client.scorer = lambda _: [next(values)]
    answer = rerank(http, documents=["a"] * 5)
    assert order_of(answer) == [3, 2, 1, 0, 4]
    scores = {r["index"]: r["relevance_score"] for r in answer.json()["results"]}
    assert scores[0] < scores[1] < 1


@pytest.mark.parametrize(
    ("top_n", "count"), [(1, 1), (3, 3), (5, 5), (6, 5), (None, 5), (10**30, 5), (2**63, 5)]
)
def test_top_n(http, top_n, count):
    answer = rerank(http, documents=["a", "red", "a", "kite", "a"], top_n=top_n)
    assert order_of(answer) == [1, 0, 2, 4, 3][:count]


@pytest.mark.parametrize("top_n", [0, -1, -(10**30), 1.5, "2", True, [1]])
def test_a_wrong_top_n_is_refused(http, top_n):
    assert error_of(rerank(http, top_n=top_n))["param"] == "top_n"
    assert http.client.calls == []


def test_documents_come_back_if_asked_for(http):
    documents = ["a <b> & \u2028 \U0001f999", {"text": "red", "title": "x"}, ""]
    results = rerank(http, documents=documents, return_documents=True).json()["results"]
    assert [r["document"] for r in results] == [{"text": t} for t in ("red", documents[0], "")]
    for nothing in (False, None):
        results = rerank(http, return_documents=nothing).json()["results"]
        assert all("document" not in result for result in results)


# The query and the documents


def test_pairs_are_joined_as_the_tokenizer_does():
    http = serve(ranker())
    rerank(http, query="a red", documents=["kite", "", {"text": "[SEP] a"}])
    pairs = [[A, RED, KITE], [A, RED], [A, RED, SEP, A]]  # the stub's tokenizer has no pair form
    assert ids_of(http) == pairs
    rerank(http, query={"text": "a red"}, documents=["kite"])
    assert ids_of(http) == pairs[:1]
    assert http.client.calls[-1]["segments"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": 3}, "query"),
        ({"query": ["a"]}, "query"),
        ({"query": {"image": "x"}}, "query"),
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": {"text": "a"}}, "documents"),
        ({"documents": ["a", None]}, "documents[1]"),
        ({"documents": ["a", 7]}, "documents[1]"),
        ({"documents": ["a", ["b"]]}, "documents[1]"),
        ({"documents": ["a", True]}, "documents[1]"),
        ({"documents": [{"text": None}]}, "documents[0].text"),
        ({"documents": [{"text": 7}]}, "documents[0].text"),
        ({"documents": [{}]}, "documents[0]"),
        ({"documents": [{"image": "x"}]}, "documents[0]"),
        ({"texts": ["a"]}, "texts"),
        ({"documents": None, "texts": []}, "texts"),
        ({"documents": None, "texts": ["a", 1]}, "texts[1]"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"raw_scores": 1}, "raw_scores"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"max_tokens_per_doc": -4}, "max_tokens_per_doc"),
        ({"max_tokens_per_doc": "9"}, "max_tokens_per_doc"),
        ({"max_chunks_per_doc": 2}, "max_chunks_per_doc"),
        ({"use_activation": False}, "use_activation"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"truncate": 3}, "truncate"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 33}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 9, "truncate": False}, "truncate_prompt_tokens"),
        ({"truncation_side": "top"}, "truncation_side"),
        ({"truncation_direction": "up"}, "truncation_direction"),
        (
            {"truncation_direction": "Left", "truncation_side": "right"},
            "truncation_direction",
        ),
        ({"truncation_strategy": "only_first"}, "truncation_strategy"),
        ({"instruction": "find"}, "instruction"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"prompt": "a", "prompt_name": "query"}, "prompt_name"),
        ({"priority": "high"}, "priority"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"model": 3}, "model"),
    ],
)
def test_what_is_wrong_is_named(http, fields, param):
    error = error_of(rerank(http, **fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert http.client.calls == []
    assert rerank(http).status_code == 200


def test_missing_fields_are_named(http):
    assert error_of(http.post("/v1/rerank", {}))["param"] == "documents"
    assert error_of(http.post("/v1/rerank", {"query": "a"}))["param"] == "documents"
    assert error_of(http.post("/v1/rerank", {"documents": ["a"]}))["param"] == "query"
    assert error_of(http.post("/v1/rerank", {"texts": ["a"]}))["param"] == "query"


def test_null_means_absent(http):
    names = (
        *("model", "top_n", "return_documents", "return_text", "max_tokens_per_doc", "truncate"),
        *("instruction", "raw_scores", "priority", "texts", "rank_fields", "user", "request_id"),
        *("prompt", "prompt_name", "truncation_strategy", "max_chunks_per_doc"),
    )
    assert rerank(http, **dict.fromkeys(names)).json()["results"] == rerank(http).json()["results"]
    assert rerank(http, unheard_of=[1], temperature="x").status_code == 200
    nothing = {"rank_fields": ["text"], "instruction": "", "max_chunks_per_doc": 1, "prompt": ""}
    assert rerank(http, **nothing).json()["results"] == rerank(http).json()["results"]


def test_odd_texts(http):
    texts = ["\U0001f999", "名前 は", "e\u0301", "\x00", "\u202e", "\t\n ", "a" * 300]
    assert sorted(order_of(rerank(http, query="\U0001f999", documents=texts))) == list(range(7))
    for body in (
        rb'{"query":"a","documents":["bad \ud83d end"]}',
        rb'{"query":"bad \ud83d end","documents":["a"]}',
        b'{"query":"a","documents":["\xff"]}',
        b'{"query":"a","documents":["a"],"top_n":NaN}',
        b'{"query":"a","query":"b","documents":["a"]}',
    ):
        error_of(http.post("/v1/rerank", body))
    pair = rb'{"query":"a","documents":["good \ud83e\udd99 end"],"return_documents":true}'
    results = http.post("/v1/rerank", pair).json()["results"]
    assert results[0]["document"]["text"] == "good \U0001f999 end"


def test_a_pair_without_any_token_is_refused(http):
    assert error_of(rerank(http, query="", documents=["a", ""]))["param"] == "documents[1]"
    assert rerank(http, query="", documents=["a"]).status_code == 200


def test_too_many_documents():
    http = serve(ranker(), max_inputs=3)
    error = error_of(rerank(http, documents=["a"] * 4))
    assert error["param"] == "documents"
    assert "at most 3" in error["message"]
    assert rerank(http, documents=["a"] * 3).status_code == 200


# Length


def test_too_long_is_refused_with_the_limit(http):
    error = error_of(rerank(http, documents=["a", LONG]))
    assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")
    assert "41 tokens with its query" in error["message"]
    assert "32" in error["message"]
    assert error_of(rerank(http, query=LONG))["param"] == "query"
    assert error_of(rerank(http, documents=["a", "red " * 40_000]))["param"] == "documents[1]"


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({"truncate": True}, (10, 22)),
        ({"truncate": "END"}, (10, 22)),
        ({"truncate_prompt_tokens": 12}, (6, 6)),
        ({"truncate_prompt_tokens": 12, "truncation_strategy": "only_second"}, (10, 2)),
        ({"truncate_prompt_tokens": -1}, (10, 22)),
        ({"max_tokens_per_doc": 4}, (10, 4)),
        ({"max_tokens_per_doc": 4, "truncate_prompt_tokens": 8}, (4, 4)),
        ({"max_tokens_per_doc": 40, "truncate": True}, (10, 22)),
        ({"max_tokens_per_doc": 40}, (10, 22)),
        ({"max_tokens_per_doc": 4, "truncate": False}, (10, 4)),
    ],
)
def test_truncation_is_reported(http, fields, lengths):
    answer = rerank(http, query="a " * 10, documents=[LONG, "red"], **fields)
    first = np.array(ids_of(http)[0])
    assert (int(np.sum(first == A)), int(np.sum(first == RED))) == lengths
    usage = answer.json()["usage"]
    fed = sum(len(row) for row in ids_of(http))
    assert usage == {"prompt_tokens": fed, "total_tokens": fed, "truncated_tokens": 50 - fed + 11}


def test_where_texts_are_cut(http):
    documents = ["kite " + LONG + "fine"]
    for fields, kept in (
        ({"truncate": "START"}, False),
        ({"truncate": True, "truncation_side": "left"}, False),
        ({"truncate": True, "truncation_direction": "Left"}, False),
        ({"truncate": True, "truncation_direction": "right"}, True),
        ({"truncate": True}, True),
    ):
        rerank(http, documents=documents, **fields)
        assert (KITE in ids_of(http)[0]) == kept
    http = serve(ranker(tokenizer={"truncation_side": "left"}))
    rerank(http, documents=documents, truncate=True)
    assert KITE not in ids_of(http)[0]


def test_documents_are_not_cut_further_against_the_requests_will(http):
    error = error_of(rerank(http, documents=[LONG], max_tokens_per_doc=35, truncate=False))
    assert error["param"] == "documents[0]"
    error = error_of(rerank(http, query=LONG, max_tokens_per_doc=4))
    assert (error["param"], "no room" in error["message"]) == ("query", True)


def test_a_query_that_fills_the_model_leaves_no_room(http):
    fields = {"truncate": True, "truncation_strategy": "only_second"}
    error = error_of(rerank(http, query=LONG, **fields))
    assert error["param"] == "query"
    assert "no room" in error["message"]


def test_the_server_may_cut_by_itself():
    http = serve(ranker(), truncate=True)
    assert rerank(http, documents=[LONG]).status_code == 200
    assert error_of(rerank(http, documents=[LONG], truncate=False))["param"] == "documents[0]"


# Prompts


def test_a_prompt_goes_before_the_query():
    http = serve(ranker(scoring={"prompts": {"ask": "query "}, "default_prompt_name": "ask"}))
    rerank(http, query="a", documents=["red"])
    assert ids_of(http) == [[QUERY, A, RED]]
    rerank(http, query="a", documents=["red"], prompt="kite ")
    assert ids_of(http) == [[KITE, A, RED]]
    rerank(http, query="a", documents=["red"], prompt="")
    assert ids_of(http) == [[A, RED]]
    error = error_of(rerank(http, prompt_name="tell"))
    assert (error["param"], "'ask'" in error["message"]) == ("prompt_name", True)


def words(http):
    backend = json.loads(tokenizer_json())
    names = {index: word for word, index in backend["model"]["vocab"].items()}
    return [" ".join(names[i] for i in row) for row in ids_of(http)]


def test_a_template_has_places_for_all():
    http = serve(ranker(scoring={"kind": "yes_no", "template": TEMPLATE}))
    rerank(http, query="red", documents=["kite", "{query} hill"])
    assert words(http)[0] == "[ a fine text query : red document : kite ]"
    assert words(http)[1].endswith("document : [UNK] query [UNK] hill ]")  # braces stay as they are
    rerank(http, query="red", documents=["kite"], instruction="word")
    assert words(http) == ["[ word query : red document : kite ]"]
    rerank(http, query="red", documents=["kite"], instruction="")
    assert words(http) == ["[ query : red document : kite ]"]


def test_a_template_stays_whole_when_documents_are_cut():
    http = serve(ranker(scoring={"kind": "yes_no", "template": TEMPLATE}))
    document = "kite " + LONG + "hill"
    answer = rerank(http, query="red", documents=[document], truncate=True)
    (right,) = words(http)
    assert len(right.split()) == 32
    assert right.startswith("[ a fine text query : red document : kite red")
    assert right.endswith("red ]")
    assert answer.json()["usage"]["truncated_tokens"] == 20
    rerank(http, query="red", documents=[document], truncate=True, truncation_side="left")
    (left,) = words(http)
    assert left.startswith("[ a fine text query : red document : red")
    assert left.endswith("hill ]")
    rerank(http, query="red", documents=[document], max_tokens_per_doc=2)
    assert words(http) == ["[ a fine text query : red document : kite red ]"]
    error = error_of(rerank(http, query=LONG, truncate=True))
    assert (error["param"], "no room" in error["message"]) == ("query", True)


def test_a_query_is_not_repeated_without_end(monkeypatch):
    monkeypatch.setattr(pairs, "MAX_RENDERED_CHARS", 1000)
    http = serve(ranker(scoring={"kind": "yes_no", "template": TEMPLATE}))
    assert rerank(http, query="red " * 9, documents=["a"] * 20).status_code == 200
    error = error_of(rerank(http, query="red " * 9, documents=["a"] * 30))
    assert (error["param"], "1110 characters" in error["message"]) == ("documents", True)


ROLES = "{% for m in messages %}{{ m.role }} : {{ m.content }} . {% endfor %}"


def chat_ranker(template=ROLES):
    from rose.models.card import ChatTexts

    facts = {"kind": "yes_no", "chat": ChatTexts()}
    return serve(ranker(scoring=facts, tokenizer={"chat_templates": {"default": template}}))


def test_a_chat_template_gets_a_message_for_each():
    http = chat_ranker()
    rerank(http, query="red", documents=["kite"])
    assert words(http) == ["query : red . document : kite ."]
    rerank(http, query="red", documents=["kite"], instruction="a fine word")
    assert words(http) == ["[UNK] : a fine word . query : red . document : kite ."]
    rerank(http, query="red", documents=[LONG], max_tokens_per_doc=2)
    assert words(http) == ["query : red . document : red red ."]
    error = error_of(rerank(http, instruction="a", prompt="b"))
    assert error["param"] == "instruction"
    refusing = chat_ranker("{{ raise_exception('no pairs here') }}")
    error = error_of(rerank(refusing))
    assert "no pairs here" in error["message"]


# Models


def test_segments_are_sent_to_models_that_want_them():
    http = serve(ranker(scoring={"segment_ids": True}))
    rerank(http, query="a", documents=["red kite", "red"])
    assert [part.tolist() for part in http.client.calls[-1]["segments"]] == [[0, 1, 1], [0, 1]]


def mixed(**settings):
    clients = {
        "embedder": StubClient(card("embedder")),
        "llm": StubClient(card("llm", tasks=("generate",))),
        "ranker": ranker("ranker"),
        "classifier": ranker(
            "classifier", tasks=("classify",), scoring={"labels": ("x", "y", "z")}
        ),
    }
    http = Http(clients, **settings)
    http.clients = clients
    return http


def test_only_rankers_rank():
    http = mixed()
    assert rerank(http).json()["model"] == "ranker"
    for name, can in (
        ("embedder", f"embed (/v1/embeddings).{BY_COSINE}"),
        ("llm", "generate (/v1/chat/completions, /v1/completions)."),
        ("classifier", "classify (/v1/classify)."),
    ):
        error = error_of(rerank(http, model=name))
        assert error["param"] == "model"
        assert error["message"] == f"The model '{name}' cannot rank documents; it can: {can}"
    assert error_of(rerank(http, model="nope"), 404)["code"] == "model_not_found"
    http = Http({"embedder": StubClient(card("embedder"))})
    error = error_of(rerank(http))
    message = "No served model can rank documents; served: 'embedder' (embed)."
    assert error["message"] == message + BY_COSINE
    error = error_of(
        http.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    )
    assert error["message"].startswith("No served model can generate text; served: 'embedder'")


def test_two_rankers_need_a_name():
    http = Http({"one": ranker("one"), "two": ranker("two")})
    assert error_of(rerank(http))["param"] == "model"
    assert rerank(http, model="two").json()["model"] == "two"


def test_a_model_that_is_not_ready(http):
    http.client.ready, http.client.unready_reason = False, "loading"
    error_of(rerank(http), 503)


def embedder(**facts):
    return StubClient(card("stub", embedding=facts))


def test_an_embedder_ranks_by_cosine_where_that_is_asked_for():
    prompts = {"query": "query : ", "document": "document : "}
    http = serve(embedder(prompts=prompts), rank_by_cosine=True)
    answer = rerank(http, query="a red", documents=["kite", "a red", "hill"])
    asked, found = http.client.calls[-2:]
    assert [len(row) for row in asked["ids"]] == [6]
    assert [len(row) for row in found["ids"]] == [5, 6, 5]
    rows = [http.client._vectors(call["ids"], call["options"]) for call in (asked, found)]
    cosines = (rows[1] @ rows[0][0]).tolist()
    results = answer.json()["results"]
    assert order_of(answer) == sorted(range(3), key=lambda i: -cosines[i])
    for result in results:
        assert result["relevance_score"] == pytest.approx(cosines[result["index"]], abs=1e-6)
    assert answer.json()["usage"]["prompt_tokens"] == 22
    rerank(http, query="a", documents=["kite"], prompt="red ")
    assert http.client.calls[-2]["ids"][0].tolist() == [CLS, RED, A, SEP]


def test_errors_of_an_embedder_that_ranks():
    http = serve(embedder(), rank_by_cosine=True)
    assert error_of(rerank(http, documents=["a", LONG]))["param"] == "documents[1]"
    assert error_of(rerank(http, query=LONG))["param"] == "query"
    unfit = {"instruction": "x", "truncation_strategy": "only_second", "max_chunks_per_doc": 0}
    for name, value in unfit.items():
        assert error_of(rerank(http, **{name: value}))["param"] == name
    assert rerank(http, truncation_strategy="longest_first").status_code == 200
    answer = rerank(http, documents=[LONG], max_tokens_per_doc=5)
    assert len(http.client.calls[-1]["ids"][0]) == 5
    assert answer.json()["usage"]["truncated_tokens"] == 37
    assert error_of(rerank(http, max_tokens_per_doc=2))["param"] == "max_tokens_per_doc"
    http.client.failure = EngineError("non_finite", "NaN", "input[0]")
    assert error_of(rerank(http), 500)["param"] == "query"
    http.client.failure = EngineError("unavailable", "it is gone")
    assert error_of(rerank(http), 503)["param"] is None


def test_a_ranker_goes_before_an_embedder():
    http = mixed(rank_by_cosine=True)
    assert rerank(http).json()["model"] == "ranker"
    assert rerank(http, model="embedder").json()["model"] == "embedder"
    both = ranker("both", tasks=("embed", "score"))
    rerank(serve(both, rank_by_cosine=True))
    assert "options" not in both.calls[-1]  # it scored


# Failures, cancellation and the like


def test_numbers_that_are_not_finite_fail_their_document(http):
    http.client.spoil = 1
    error = error_of(rerank(http), 500)
    assert (error["param"], error["code"]) == ("documents[1]", "non_finite")
    http.client.spoil = None
    assert rerank(http).status_code == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [("overloaded", 429), ("deadline", 504), ("unavailable", 503), ("internal", 500)],
)
def test_failures_of_the_engine(http, kind, status):
    http.client.failure = EngineError(kind, "it failed", "input[1]")
    answer = rerank(http)
    assert error_of(answer, status)["param"] == "documents[1]"
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    http.client.failure = EngineError(kind, "it failed")
    assert error_of(rerank(http), status)["param"] is None  # no field is at fault


def test_priority_and_id_reach_the_engine():
    http = serve(ranker())
    answer = rerank(http, priority="bulk", request_id="mine")
    call = http.client.calls[-1]
    assert (call["priority"], call["trace"]) == ("bulk", "mine")
    assert answer.json()["id"] == answer.headers["x-request-id"] == "mine"


def test_deadline():
    http = serve(ranker(), request_timeout_s=0.05)
    http.client.delay_s = 5
    assert error_of(rerank(http), 504)["code"] == "deadline"
    assert (http.client.running, http.client.cancelled) == (0, 1)


def test_metrics_count_pairs_and_tokens(http):
    rerank(http, query="a", documents=["red", LONG], truncate=True)
    text = http.get("/metrics").text
    assert 'rose_prompt_tokens_total{model="stub"} 34.0' in text
    assert 'rose_truncated_tokens_total{model="stub"} 9.0' in text
    assert 'rose_request_batch_size_sum{model="stub"} 2.0' in text
    assert 'rose_requests_total{route="/v1/rerank",status="200"} 1.0' in text
    assert 'rose_compute_seconds_count{model="stub"} 1.0' in text


def test_the_description_has_the_routes(http):
    paths = http.get("/openapi.json").json()["paths"]
    for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/v1/classify"):
        assert "post" in paths[path]
    assert paths["/rerank"]["post"]["x-alias-of"] == "/v1/rerank"
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert "top_n" in schemas["RerankRequest"]["properties"]


def test_answers_are_as_the_description_says():
    """Decodes real answers, those of the examples too, by the structs that it is made from."""
    classifier = ranker("c", tasks=("classify",), scoring={"labels": ("x", "y")})
    classifier.scorer = lambda _: [1.0, 2.0]
    http = Http({"r": ranker("r", vocab_size=30_000), "c": classifier})
    texts = {"query": "a", "texts": ["red"], "return_text": True}
    for operation in (op for op in OPERATIONS if op.tag == "Ranking"):
        bodies = [operation.example]
        bodies += [texts] if operation.path == "/v1/rerank" else []
        bodies += [{"inputs": [["a"]]}, {"inputs": "a"}] if operation.path == "/v1/classify" else []
        for body in bodies:
            answer = http.post(operation.path, body)
            assert answer.status_code == 200, answer.text
            msgspec.json.decode(answer.content, type=operation.answer, strict=True)


def test_the_list_of_models_says_what_a_ranker_is(http):
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["task"], model["labels"]) == ("score", ["LABEL_0"])
    facts = http.get("/info").json()
    assert facts["model_type"] == {
        "reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    }


def test_a_tokenizer_that_turns_pairs_around_is_no_fault_of_the_server():
    source = json.loads(tokenizer_json())
    parts = [{"Sequence": {"id": text, "type_id": 0}} for text in "AB"]
    source["post_processor"] |= {"single": parts[:1], "pair": parts[::-1], "special_tokens": {}}
    http = serve(ranker(source=json.dumps(source).encode()))
    assert "does not put two texts together" in error_of(rerank(http))["message"]
