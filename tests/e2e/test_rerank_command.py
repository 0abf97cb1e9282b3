"""`rose rerank`, from the command line to the file, also when it is stopped on the way."""

import csv
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from rose import Engine
from rose.runtime.errors import RequestError
from rose.serving.cli import main
from rose.serving.offline import rerank as module
from tests import tiny

QUERY = "who keeps red kites"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny cross-encoder, limited to 40 tokens, with a prompt."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    path = tiny.save_encoder(folder, "bert", head="classifier", num_labels=1)
    tiny.edit_json(path / "config_sentence_transformers.json", prompts={"ask": "the tea "})
    return path


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, max_batch_tokens=256) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def sentences(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(tiny.WORDS, k=rng.randint(1, 12))) for _ in range(count)]


def rerank(model, *arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(["rerank", str(model), "--max-batch-tokens", "256", *map(str, arguments)])
    return caught.value.code


def lines(path="out.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def check_ranking(found, texts, scores):
    order = np.argsort(-np.array(scores), kind="stable").tolist()[: len(found)]
    assert [item["index"] for item in found] == order
    assert [item["rank"] for item in found] == list(range(1, len(found) + 1))
    assert [item["text"] for item in found] == [texts[i] for i in order]
    assert [item["score"] for item in found] == pytest.approx([scores[i] for i in order], abs=1e-5)


def test_lines_of_a_file_by_one_query(model, engine, capsys):
    texts = [*sentences(20), "", "tea"]
    Path("a.txt").write_text("".join(f"{text}\n" for text in texts))
    scores = engine.score(QUERY, texts).tolist()
    assert rerank(model, "a.txt", "--query", QUERY, "-o", "out.jsonl") == 0
    check_ranking(lines(), texts, scores)
    assert "1 query, 22 documents, " in capsys.readouterr().out
    assert rerank(model, "a.txt", "--query", QUERY, "--top-n", 3, "-o", "best.jsonl") == 0
    check_ranking(lines("best.jsonl"), texts, scores)
    assert len(lines("best.jsonl")) == 3


def test_columns_of_tables_are_kept(model, engine):
    texts = sentences(7)
    rows = [{"id": i, "body": text} for i, text in enumerate(texts)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with Path("b.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "body"), *((i, text) for i, text in enumerate(texts))])
    parquet.write_table(pa.table({"id": range(7), "body": texts}), "c.parquet")
    scores = engine.score(QUERY, texts).tolist()
    for path in ("a.jsonl", "b.csv", "c.parquet"):
        options = ["--query", QUERY, "--column", "body", "--keep", "id"]
        assert rerank(model, path, *options, "-o", f"{path}.out.jsonl") == 0
        found = lines(f"{path}.out.jsonl")
        check_ranking(found, texts, scores)
        assert [int(item["id"]) for item in found] == [item["index"] for item in found]


QUESTIONS = [
    {"id": 1, "query": "red tea", "documents": sentences(5, seed=1)},
    {"id": 2, "query": "kite", "documents": []},
    {"id": 3, "query": "", "documents": sentences(3, seed=2)},
    *({"id": i, "query": "sea", "documents": sentences(2, seed=i)} for i in range(4, 40)),
]


def check_questions(engine, found, top_n=None):
    assert [item["index"] for item in found] == list(range(len(QUESTIONS)))
    for item, question in zip(found, QUESTIONS, strict=True):
        scores = engine.score(question["query"], question["documents"])
        order = np.argsort(-scores, kind="stable").tolist()[:top_n]
        assert [result["index"] for result in item["results"]] == order
        shown = [result["score"] for result in item["results"]]
        assert shown == pytest.approx(scores[order].tolist(), abs=1e-5)


@pytest.mark.parametrize("path", ["a.jsonl", "a.parquet"])
def test_documents_of_each_row_by_its_query(model, engine, path):
    if path.endswith("jsonl"):
        Path(path).write_text("\n".join(map(json.dumps, QUESTIONS)))
    else:
        parquet.write_table(pa.Table.from_pylist(QUESTIONS), path)
    assert rerank(model, path, "-o", "out.jsonl", "--keep", "id") == 0
    check_questions(engine, lines())
    assert [item["id"] for item in lines()] == [question["id"] for question in QUESTIONS]
    assert rerank(model, path, "-o", "two.jsonl", "--top-n", 2, "--texts") == 0
    check_questions(engine, lines("two.jsonl"), top_n=2)
    first = lines("two.jsonl")[0]["results"][0]
    assert first["text"] == QUESTIONS[0]["documents"][first["index"]]


def test_options_reach_the_model(model, engine):
    texts = sentences(4)
    Path("a.txt").write_text("".join(f"{text}\n" for text in texts))
    for flags, options in (
        (["--raw-scores"], {"raw_scores": True}),
        (["--prompt-name", "ask"], {"prompt_name": "ask"}),
        (["--prompt", "sea "], {"prompt": "sea "}),
        (["--max-tokens-per-doc", 2], {"max_tokens_per_doc": 2}),
        (["--truncate", "--max-model-len", 12], None),
    ):
        assert rerank(model, "a.txt", "--query", QUERY, *flags, "-o", "o.jsonl", "--force") == 0
        if options is not None:
            check_ranking(lines("o.jsonl"), texts, engine.score(QUERY, texts, **options).tolist())


@pytest.mark.parametrize("one_query", [True, False])
def test_a_job_that_was_stopped_goes_on(model, engine, monkeypatch, one_query, capsys):
    texts = sentences(20)
    Path("a.txt").write_text("".join(f"{text}\n" for text in texts))
    Path("a.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    monkeypatch.setattr(module, "CHUNK_DOCUMENTS", 4)
    monkeypatch.setattr(module, "CHUNK_QUERIES", 4)
    arguments = ["a.txt", "--query", QUERY] if one_query else ["a.jsonl"]
    whole = module._Run._rank
    calls = []

    def stop(self, engine, chunk):
        calls.append(chunk.first)
        if len(calls) == 3:
            raise KeyboardInterrupt
        whole(self, engine, chunk)

    monkeypatch.setattr(module._Run, "_rank", stop)
    assert rerank(model, *arguments, "-o", "out.jsonl") == 130
    assert "8 texts are done" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
    assert rerank(model, *arguments, "-o", "out.jsonl", "--top-n", 1) == 1
    assert "--top-n was not given and is 1" in capsys.readouterr().err
    assert rerank(model, *arguments, "-o", "out.jsonl") == 0
    assert calls[:4] == [0, 4, 8, 8]
    assert not Path("out.jsonl.partial").exists()
    if one_query:
        check_ranking(lines(), texts, engine.score(QUERY, texts).tolist())
        assert "20 documents" in capsys.readouterr().out
    else:
        check_questions(engine, lines())


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (
            "red\n" + "tea " * 60,
            ["--query", "a"],
            "a.txt, line 2: the document has 64 tokens with its query",
        ),
        ("red\n", ["--query", "tea " * 60], "--query: the query has 63 tokens"),
        ("", ["--query", "a"], "holds nothing to rank"),
        ("red\n", [], "without --query"),
        ("red\n", ["--query", "a", "--prompt-name", "x"], "the model has: ask"),
        ("red\n", ["--query", "a", "--instruction", "x"], "no place"),
        ("red\n", ["--query", "a", "--keep", "id"], "has no columns"),
    ],
)
def test_what_is_wrong_is_named(model, capsys, content, arguments, said):
    Path("a.txt").write_text(content)
    assert rerank(model, "a.txt", *arguments, "-o", "out.jsonl") == 1
    assert said in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"query": "a"}, "column 'documents'"),
        ({"query": "a", "documents": "red"}, "a list of texts"),
        ({"query": "a", "documents": ["red", 1]}, "a list of texts"),
        ({"query": "a", "documents": ["tea " * 60]}, "the document has 64 tokens"),
        ({"query": 3, "documents": ["red"]}, "column 'query': a text is expected"),
    ],
)
def test_wrong_rows_are_named(model, capsys, row, said):
    rows = [{"query": "a", "documents": ["red"]}, row]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert rerank(model, "a.jsonl", "-o", "out.jsonl") == 1
    error = capsys.readouterr().err
    assert said in error
    assert "line 2" in error


def test_outputs_and_models_that_do_not_fit(model, capsys, tmp_path):
    Path("a.txt").write_text("red\n")
    for output, said in (("out.npy", ".jsonl"), ("no/out.jsonl", "does not exist")):
        assert rerank(model, "a.txt", "--query", "a", "-o", output) == 1
        assert said in capsys.readouterr().err
    Path("out.jsonl").write_text("")
    assert rerank(model, "a.txt", "--query", "a", "-o", "out.jsonl") == 1
    assert "--force" in capsys.readouterr().err
    embedder = tiny.save_bert(tmp_path / "embedder")
    assert rerank(embedder, "a.txt", "--query", "a", "-o", "x.jsonl") == 1
    assert "cannot score" in capsys.readouterr().err


def test_an_embedder_ranks_by_cosine_where_that_is_asked_for(tmp_path, capsys):
    path = tiny.save_bert(tmp_path / "embedder")
    prompts = {"query": "the tea ", "document": "a hill "}
    tiny.edit_json(path / "config_sentence_transformers.json", prompts=prompts)
    texts = sentences(9)
    Path("texts.txt").write_text("\n".join(texts) + "\n")
    command = (path, "texts.txt", "--query", QUERY, "-o", "out.jsonl")
    assert rerank(*command) == 1
    assert "cannot score, only embed; --rank-by-cosine ranks" in capsys.readouterr().err
    assert rerank(*command, "--rank-by-cosine") == 0
    with Engine(path, max_batch_tokens=256, rank_by_cosine=True) as engine:
        query = engine.embed(QUERY, prompt_name="query", normalize=True)
        cosines = engine.embed(texts, prompt_name="document", normalize=True) @ query[0]
        np.testing.assert_allclose(engine.score(QUERY, texts), cosines, atol=1e-6)
        pairs = engine.score([QUERY, QUERY], texts[:2], prompt="", max_tokens_per_doc=8)
        assert pairs.shape == (2,)
    check_ranking(lines(), texts, cosines)
    plain = Engine(path, max_batch_tokens=256)
    with plain, pytest.raises(RequestError, match="rank_by_cosine=True"):
        plain.rank(QUERY, texts)
