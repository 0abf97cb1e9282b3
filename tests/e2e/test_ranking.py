"""Ranking, scores and classes from the real process tree, against the reference libraries."""

from concurrent.futures import ThreadPoolExecutor

import cohere
import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import tiny
from tests.e2e.conftest import Server
from tests.parity.test_classifiers import reference_yes_no, save_ranker

pytestmark = pytest.mark.golden

QUERY = "Which bird hunts over the hill?"
DOCUMENTS = [
    "A red kite is a bird of prey that circles above slopes.",
    "Green tea is best at eighty degrees.",
    "",
    "Der Rotmilan jagt über dem Hügel.",
    "山の上の赤い凧 🪁",
    "A red kite is a bird of prey that circles above slopes. " * 60,
    "Green tea is best at eighty degrees.",
]
LABELS = {0: "contradiction", 1: "entailment", 2: "neutral"}


@pytest.fixture(scope="module")
def folder(minilm, tmp_path_factory):
    """A cross-encoder on MiniLM, a ranker of Qwen3-Reranker's form, and a classifier."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=1)
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    model.save_pretrained(folder / "cross-encoder")
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder / "cross-encoder")
    save_ranker(folder / "qwen", max_position_embeddings=2048)
    tiny.save_encoder(folder / "classifier", "bert", head="classifier", id2label=LABELS)
    return folder


@pytest.fixture(scope="module")
def rankers(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("rankers") / "log"
    models = [folder / "cross-encoder", folder / "qwen"]
    server = Server(*models, "--task", "score", "--dtype", "float32", log=log, threads=2)
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def others(folder, minilm, tmp_path_factory):
    """A classifier, an embedder that may rank, and a cross-encoder with two replicas."""
    log = tmp_path_factory.mktemp("others") / "log"
    models = [folder / "classifier", minilm, folder / "cross-encoder"]
    server = Server(*models, "--rank-by-cosine", "--replicas", "2", log=log)
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def expected(folder):
    model = CrossEncoder(str(folder / "cross-encoder"), device="cpu")
    return model.predict([(QUERY, document) for document in DOCUMENTS])


def post(server, path, **body):
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rerank(server, **body):
    body = {"model": "cross-encoder", "query": QUERY, "documents": DOCUMENTS, **body}
    return post(server, "/v1/rerank", **body)["results"]


def test_order_and_scores_are_those_of_a_cross_encoder(rankers, expected):
    results = rerank(rankers, truncate=True)
    assert [r["index"] for r in results] == np.argsort(-expected, kind="stable").tolist()
    scores = [r["relevance_score"] for r in results]
    np.testing.assert_allclose(scores, np.sort(expected)[::-1], atol=1e-4)


def test_alone_and_in_a_batch_the_scores_are_the_same(rankers, expected):
    with ThreadPoolExecutor(4) as pool:
        alone = list(pool.map(lambda d: rerank(rankers, documents=[d], truncate=True), DOCUMENTS))
    np.testing.assert_allclose([r[0]["relevance_score"] for r in alone], expected, atol=1e-4)


def test_the_forms_agree(rankers, expected):
    order = np.argsort(-expected, kind="stable").tolist()
    body = {"model": "cross-encoder", "query": QUERY, "truncate": True}
    ranked = post(rankers, "/rerank", texts=DOCUMENTS, return_text=True, **body)
    assert [item["index"] for item in ranked] == order
    assert [item["text"] for item in ranked] == [DOCUMENTS[i] for i in order]
    np.testing.assert_allclose([i["score"] for i in ranked], expected[order], atol=1e-4)
    body = {"model": "cross-encoder", "text_1": QUERY, "text_2": DOCUMENTS, "truncate": True}
    data = post(rankers, "/v1/score", **body)["data"]
    np.testing.assert_allclose([item["score"] for item in data], expected, atol=1e-4)
    raw = post(rankers, "/v1/score", **body, raw_scores=True)["data"]
    shown = 1 / (1 + np.exp(-np.array([item["score"] for item in raw])))
    np.testing.assert_allclose(shown, expected, atol=1e-4)


def test_what_is_cut_is_reported(rankers):
    body = {"model": "cross-encoder", "query": QUERY, "documents": DOCUMENTS}
    answer = httpx.post(f"{rankers.url}/v1/rerank", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "documents[5]"
    usage = post(rankers, "/v1/rerank", **body, truncate=True)["usage"]
    assert usage["truncated_tokens"] > 100


@pytest.mark.parametrize("kind", [cohere.ClientV2, cohere.Client])
def test_the_stock_cohere_clients(rankers, expected, kind):
    best = np.argsort(-expected[:5], kind="stable").tolist()[:3]
    options = {"model": "cross-encoder", "query": QUERY, "top_n": 3}
    with httpx.Client(timeout=60) as http:
        client = kind(api_key="none", base_url=rankers.url, httpx_client=http)
        answer = client.rerank(documents=DOCUMENTS[:5], **options)
        with pytest.raises(cohere.errors.BadRequestError) as caught:
            client.rerank(documents=[], **options)
    assert [result.index for result in answer.results] == best
    found = [result.relevance_score for result in answer.results]
    np.testing.assert_allclose(found, expected[best], atol=1e-4)
    assert answer.meta.tokens.input_tokens > 0
    assert answer.id
    assert caught.value.body["error"]["param"] == "documents"


def test_a_yes_or_no_ranker_is_computed_as_qwen3_rerankers_are(rankers, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "qwen")
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ends = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
    answers = tuple(tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    for instruction in (None, "Find birds"):
        task = instruction or (
            "Given a web search query, retrieve relevant passages that answer the query"
        )
        texts = [f"<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {d}" for d in DOCUMENTS]
        room = 2048 - len(ends[0]) - len(ends[1])
        bodies = tokenizer(texts, truncation="longest_first", max_length=room)["input_ids"]
        rows = [ends[0] + body + ends[1] for body in bodies]
        wanted = reference_yes_no(folder / "qwen", rows, answers).detach().numpy()
        fields = {"instruction": instruction, "truncate": True}
        results = rerank(rankers, model="qwen", **fields)
        ordered = wanted[[r["index"] for r in results]]
        assert (np.diff(ordered) <= 1e-6).all()  # two of the scores differ by less
        scores = {r["index"]: r["relevance_score"] for r in results}
        np.testing.assert_allclose([scores[i] for i in range(len(wanted))], wanted, atol=1e-4)


def test_a_long_list_over_replicas_comes_back_in_order(others, folder):
    words = ["kite", "hill", "red", "over", "sea", "tea", "green", "of", "many", "words"]
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(words, rng.integers(1, 30))) for _ in range(400)]
    documents[7] = documents[399] = DOCUMENTS[0]
    model = CrossEncoder(str(folder / "cross-encoder"), device="cpu")
    wanted = model.predict([(QUERY, document) for document in documents])
    scores = {r["index"]: r["relevance_score"] for r in rerank(others, documents=documents)}
    np.testing.assert_allclose([scores[i] for i in range(400)], wanted, atol=1e-4)


def test_an_embedder_ranks_by_cosine_where_the_server_allows_it(others, rankers, minilm):
    model = SentenceTransformer(str(minilm), device="cpu")
    vectors = model.encode([QUERY, *DOCUMENTS], normalize_embeddings=True)
    fields = {"model": minilm.name, "truncate": True}
    scores = {r["index"]: r["relevance_score"] for r in rerank(others, **fields)}
    found = [scores[i] for i in range(len(DOCUMENTS))]
    np.testing.assert_allclose(found, vectors[1:] @ vectors[0], atol=1e-4)


def test_classes(others, folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder / "classifier").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "classifier")
    texts = ["a red kite over the sea", "green tea"]
    with torch.no_grad():
        rows = [model(**tokenizer(t, return_tensors="pt")).logits.softmax(-1)[0] for t in texts]
    answer = post(others, "/v1/classify", model="classifier", input=texts)
    assert answer["labels"] == list(LABELS.values())
    for item, row in zip(answer["data"], rows, strict=True):
        np.testing.assert_allclose(item["probs"], row, atol=1e-4)
        assert item["label"] == LABELS[int(row.argmax())]
    tei = post(others, "/predict", model="classifier", inputs=[[text] for text in texts])
    for entries, row in zip(tei, rows, strict=True):
        assert {e["label"]: e["score"] for e in entries} == pytest.approx(
            dict(zip(LABELS.values(), row.tolist(), strict=True)), abs=1e-4
        )
        assert [e["score"] for e in entries] == sorted((e["score"] for e in entries), reverse=True)


def test_what_a_model_cannot_do_is_said(others, rankers, minilm):
    body = {"query": QUERY, "documents": DOCUMENTS[:2]}
    answer = httpx.post(f"{others.url}/v1/rerank", json={**body, "model": "classifier"}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "The model 'classifier' cannot rank documents; it can: classify (/v1/classify)."
    )
    answer = httpx.post(f"{rankers.url}/v1/embeddings", json={"input": "a"}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "No served model can embed texts; served: 'cross-encoder' (score), 'qwen' (score)."
    )


def test_metrics_and_models_know_rankers(rankers):
    rerank(rankers, documents=DOCUMENTS[:2])
    text = httpx.get(f"{rankers.url}/metrics", timeout=60).text
    assert 'rose_requests_total{route="/v1/rerank",status="200"}' in text
    assert 'rose_prompt_tokens_total{model="cross-encoder"}' in text
    models = httpx.get(f"{rankers.url}/v1/models", timeout=60).json()["data"]
    assert {model["id"]: model["tasks"] for model in models} == {
        "cross-encoder": ["score"],
        "qwen": ["score"],
    }
