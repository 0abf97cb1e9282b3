"""A late-interaction checkpoint from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from rose import Engine
from rose.serving.cli import main
from tests import late_checkpoints as late

DOCUMENTS = ["red kite over the sea.", "a", "green tea, the green tea", "short text", "the red tea"]
QUERIES = ["red kite", "green tea"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return late.save_pylate(tmp_path_factory.mktemp("late") / "model", "bert")


@pytest.fixture(scope="module")
def scores(model):
    with Engine(model, device="cpu", tasks=("score",)) as engine:
        return [engine.score(query, DOCUMENTS) for query in QUERIES]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def lines():
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_documents_of_one_query_are_ranked(model, scores):
    Path("in.txt").write_text("\n".join(DOCUMENTS))
    assert run("rerank", model, "in.txt", "--query", QUERIES[0], "-o", "out.jsonl") == 0
    found = lines()
    order = np.argsort(-scores[0], kind="stable").tolist()
    assert [item["index"] for item in found] == order
    np.testing.assert_allclose([item["score"] for item in found], scores[0][order], rtol=1e-5)


def test_rows_with_queries_are_ranked(model, scores):
    rows = [{"query": query, "documents": DOCUMENTS} for query in QUERIES]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run("rerank", model, "in.jsonl", "-o", "out.jsonl", "--top-n", 3) == 0
    for row, expected in zip(lines(), scores, strict=True):
        order = np.argsort(-expected, kind="stable")[:3].tolist()
        assert [item["index"] for item in row["results"]] == order
        found = [item["score"] for item in row["results"]]
        np.testing.assert_allclose(found, expected[order], rtol=1e-5)


def test_a_document_that_is_too_long_is_named(model, capsys):
    Path("in.txt").write_text("a\n" + "red " * 30)
    assert run("rerank", model, "in.txt", "--query", "red", "-o", "out.jsonl") != 0
    message = " ".join(capsys.readouterr().err.split())
    assert "in.txt, line 2" in message
    assert "the limit is 20" in message


def test_what_it_is_can_be_seen(model, capsys):
    assert run("inspect", model, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tasks"] == ["embed", "score"]
    assert "query marker" in {setting["name"] for setting in report["settings"]}
    assert run("models") == 0
    assert "late-interaction" in capsys.readouterr().out


def test_vectors_of_texts_are_refused_by_name(model, capsys):
    Path("in.txt").write_text("a\nred")
    assert run("embed", model, "in.txt", "-o", "out.npy") != 0
    assert "vectors of tokens alone" in " ".join(capsys.readouterr().err.split())
