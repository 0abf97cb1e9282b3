"""Late interaction: equal to sentence-transformers' MultiVectorEncoder, which reads all forms."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from rose import Engine
from tests import late_checkpoints as late
from tests.parity.served import post

QUERIES = ["red kite", "a", "the green tea, over the sea.", ""]
DOCUMENTS = ["red kite over the sea.", "a", "green tea, the green tea", "short text, longer words"]

FORMS = {
    "pylate-bert": lambda path: late.save_pylate(path, "bert"),
    "pylate-modernbert": lambda path: late.save_pylate(path, "modernbert"),
    "pylate-attend": lambda path: late.save_pylate(
        path, "modernbert", attend_to_expansion_tokens=True
    ),
    "pylate-plain": lambda path: late.save_pylate(path, "bert", do_query_expansion=False),
    "pylate-mpnet": lambda path: late.save_pylate(path, "mpnet"),
    "pylate-roberta": lambda path: late.save_pylate(path, "roberta"),
    "stanford": late.save_stanford,
    "library-bert": lambda path: late.save_library(
        path, "bert", query_expansion={"strategy": "min", "length": 8}
    ),
    "library-modernbert": lambda path: late.save_library(
        path,
        "modernbert",
        document_length=24,
        query_expansion={"strategy": "fixed", "length": 16, "token": "[UNK]"},
        mask={"skiplist_words": [","], "skiplist_tasks": ["query", "document"]},
    ),
}


@pytest.fixture(scope="module", params=list(FORMS))
def folder(request, tmp_path_factory):
    return FORMS[request.param](tmp_path_factory.mktemp("late") / request.param)


@pytest.fixture(scope="module")
def expected(folder):
    model = late.reference(folder)
    with torch.no_grad():
        queries = model.encode_query(QUERIES, convert_to_numpy=True, show_progress_bar=False)
        documents = model.encode_document(DOCUMENTS, convert_to_numpy=True, show_progress_bar=False)
        scores = model.similarity(
            [torch.from_numpy(q) for q in queries], [torch.from_numpy(d) for d in documents]
        )
    return queries, documents, scores.numpy()


def test_vectors_and_scores_are_the_references(folder, expected):
    queries, documents, scores = expected
    bodies = [
        ("/embed_all", {"inputs": QUERIES, "input_type": "query"}),
        ("/embed_all", {"inputs": DOCUMENTS, "prompt_name": "document"}),
        *(("/embed_all", {"inputs": text, "input_type": "query"}) for text in QUERIES),
        *(("/embed_all", {"inputs": text, "input_type": "document"}) for text in DOCUMENTS),
        *(("/v1/rerank", {"query": text, "documents": DOCUMENTS}) for text in QUERIES),
    ]
    answers = [answer.json() for answer in post(folder, *bodies)]
    wanted = [queries, documents, *([q] for q in queries), *([d] for d in documents)]
    for found, rows in zip(answers, wanted, strict=False):
        for mine, theirs in zip(found, rows, strict=True):
            assert np.shape(mine) == theirs.shape
            np.testing.assert_allclose(mine, theirs, atol=2e-5)
    for answer, row in zip(answers[-len(QUERIES) :], scores, strict=True):
        found = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
        np.testing.assert_allclose([found[i] for i in range(len(row))], row, atol=2e-4)


def test_in_this_process(folder, expected):
    queries, documents, scores = expected
    with Engine(folder, device="cpu", max_batch_tokens=32) as engine:
        for texts, side, wanted in (
            (QUERIES, "query", queries),
            (DOCUMENTS, "document", documents),
        ):
            found = engine.embed_types(texts, ["multi_vector"], input_type=side).multi_vector
            for mine, theirs in zip(found, wanted, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=2e-5)
        for query, row in zip(QUERIES, scores, strict=True):
            np.testing.assert_allclose(engine.score(query, DOCUMENTS), row, atol=2e-4)
        best = engine.rank(QUERIES[0], DOCUMENTS, top_n=2)
        assert [item.index for item in best] == np.argsort(-scores[0], kind="stable")[:2].tolist()
        pairs = engine.score(QUERIES, DOCUMENTS)
        np.testing.assert_allclose(pairs, np.diag(scores), atol=2e-4)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"attention": "torch_sdpa"}])
def test_every_way_of_running(tmp_path, options):
    folder = late.save_pylate(tmp_path / "model", "modernbert")
    expected = late.reference(folder).encode_query(QUERIES, convert_to_numpy=True)
    body = {"inputs": QUERIES, "input_type": "query"}
    (answer,) = post(folder, ("/embed_all", body), **options)
    for mine, theirs in zip(answer.json(), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_the_mean_of_matches(tmp_path):
    folder = late.save_library(tmp_path / "model", "bert", similarity="meanmaxsim")
    model = late.reference(folder)
    queries, documents = model.encode_query(QUERIES[:2]), model.encode_document(DOCUMENTS)
    expected = model.similarity(queries, documents).numpy()
    with Engine(folder, device="cpu") as engine:
        found = [engine.score(query, DOCUMENTS) for query in QUERIES[:2]]
    np.testing.assert_allclose(found, expected, atol=2e-5)


def by_definition(folder, text, side):
    """PyLate's own steps, written out: tokenise, mark, fill up, project, scale, skip."""
    stated = json.loads((folder / "config_sentence_transformers.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    room = stated[f"{side}_length"] - 1
    ids = tokenizer(text, truncation=True, max_length=room).input_ids
    ids.insert(1, tokenizer.convert_tokens_to_ids(stated[f"{side}_prefix"]))
    attended = len(ids)
    if side == "query":
        ids += [tokenizer.mask_token_id] * (room + 1 - len(ids))
    mask = torch.tensor([[1] * attended + [0] * (len(ids) - attended)])
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    vectors = torch.nn.functional.normalize(hidden @ weight.T, dim=1)
    skipped = tokenizer.convert_tokens_to_ids(stated["skiplist_words"])
    kept = [side == "query" or token not in skipped for token in ids]
    return vectors[kept].numpy()


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_pylate_by_its_definition(tmp_path, kind):
    folder = late.save_pylate(tmp_path / "model", kind)
    long = "red kite, over the sea. " * 6
    texts = {"query": [*QUERIES, long], "document": [*DOCUMENTS, long]}
    bodies = [
        ("/embed_all", {"inputs": rows, "input_type": side, "truncate": True})
        for side, rows in texts.items()
    ]
    for (side, rows), answer in zip(texts.items(), post(folder, *bodies), strict=True):
        for text, found in zip(rows, answer.json(), strict=True):
            expected = by_definition(folder, text, side)
            assert np.shape(found) == expected.shape
            np.testing.assert_allclose(found, expected, atol=2e-5)
