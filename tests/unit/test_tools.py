"""The measuring tools see what is wrong."""

import argparse
import json

import numpy as np
import pytest

from tools.decoding import Continuation, Verdict
from tools.generation import KnownText, Wish, read_answer, read_stream
from tools.load_test import Known, loopback_url
from tools.mistakes import Mistake, embedding_mistakes, generation_mistakes
from tools.report import Report
from tools.server import MemoryWatch, RunningServer
from tools.structured_output import SCHEMAS, fault_of
from tools.texts import corpus_texts, mixed_texts, skewed_lengths, text_of_tokens

VECTORS = (np.eye(3, 4) + 0.1).astype(np.float32)
KNOWN = Known("m", 4, ["a", "b", "c"], [[1], [2, 3], [4]], VECTORS)


def embedded(rows, tokens, model="m"):
    data = [{"index": i, "embedding": np.asarray(row).tolist()} for i, row in enumerate(rows)]
    return {"data": data, "model": model, "usage": {"prompt_tokens": tokens}}


@pytest.mark.parametrize(
    ("body", "answer", "fault"),
    [
        ({}, embedded(VECTORS[:2], 3), None),
        ({"dimensions": 2}, embedded(VECTORS[:2, :2], 3), None),
        ({}, embedded(VECTORS[1::-1], 3), "cosine"),
        ({}, embedded(np.full((2, 4), np.nan), 3), "cosine nan"),
        ({"dimensions": 2}, embedded(VECTORS[:2], 3), "4, 4] numbers instead of 2"),
        ({}, embedded(VECTORS[:2], 4), "usage"),
        ({}, embedded(VECTORS[:1], 3), "items [0]"),
        ({}, embedded(VECTORS[:2], 3, model="n"), "model 'n'"),
        ({}, {"error": {}}, "wrong form"),
    ],
)
def test_a_wrong_vector_is_seen(body, answer, fault):
    found = KNOWN.fault_of([0, 1], body, answer)
    assert found is None if fault is None else fault in found


def error(**changes):
    fields = {"message": "m", "type": "t", "param": "input", "code": None}
    return json.dumps({"error": fields | changes}).encode()


@pytest.mark.parametrize(
    ("status", "answer", "fault"),
    [
        (400, error(), None),
        (500, error(), "status 500"),
        (200, b"{}", "status 200"),
        (400, error(param="inputs"), "'inputs' instead of 'input'"),
        (400, error(param=None), "names None"),
        (400, error(message=""), "says nothing"),
        (400, b'{"detail": "no"}', "not an OpenAI error"),
        (400, b"", "not an OpenAI error"),
    ],
)
def test_a_wrong_refusal_is_seen(status, answer, fault):
    found = Mistake("x", "/", param="input").fault_of(status, answer)
    assert found is None if fault is None else fault in found


def test_the_catalogues_are_many_and_have_names_of_their_own():
    for mistakes in (embedding_mistakes("m", 384, 256), generation_mistakes("m", 512)):
        assert len(mistakes) > 25
        assert len({(m.path, m.name, m.body) for m in mistakes}) == len(mistakes)


def stream(*pieces, finish="stop", end="data: [DONE]\n\n", index=0):
    chunks = [
        {"index": index, "delta": {"content": piece}, "finish_reason": None} for piece in pieces
    ]
    chunks[-1]["finish_reason"] = finish
    events = [{"id": "1", "choices": [chunk]} for chunk in chunks]
    events.append({"id": "1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (stream("a red", " kite"), None),
        (stream("a r", finish="length"), None),
        (stream("a red", finish="stop"), "ends before"),
        (stream("a kite", finish="length"), "does not begin"),
        (stream("a red", " kite", finish=None), "finish reasons"),
        (stream("a red", " kite", index=1), "choices [1]"),
        (stream("a red", " kite", end=""), "wrong form"),
        (stream("a red", " kite").replace('"id": "1"', '"id": "2"', 1), "wrong form"),
    ],
)
def test_a_wrong_stream_is_seen(text, fault):
    wish = Wish(KnownText("/", {}, "a red kite", 3), {"max_tokens": 4})
    found = wish.fault_of(200, text, read_stream)
    assert found is None if fault is None else fault in found


def test_a_wrong_answer_is_seen():
    wish = Wish(KnownText("/", {}, "a red kite", 3), {"max_tokens": 4})
    choice = {"index": 0, "text": "a red", "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    good = {"choices": [choice], "usage": usage}
    assert wish.fault_of(200, json.dumps(good), read_answer) is None
    assert "status 500" in wish.fault_of(500, json.dumps(good), read_answer)
    wrong = {**good, "usage": {**usage, "prompt_tokens": 4}}
    assert "usage" in wish.fault_of(200, json.dumps(wrong), read_answer)
    wrong = {**good, "usage": {**usage, "completion_tokens": 5}}
    assert "usage" in wish.fault_of(200, json.dumps(wrong), read_answer)


def test_only_a_near_tie_excuses_a_token():
    expected = [Continuation([1, 2, 3], [1.0, 5e-5, 1.0])] * 4
    outputs = [[1, 2, 3], [1, 9, 9], [9, 2, 3], [1, 2, 9]]
    assert Verdict.of(outputs, expected) == Verdict(equal=1, excused=1, wrong=2)


def test_a_report_fails_with_one_bound(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["x.py", "--model", "/somewhere/else/model", "--json", "f"])
    report = Report("x", "X", "About.")
    options = argparse.Namespace(json=str(tmp_path / "f"), write_page=False)
    report.check("a", 1, "1", kept=True)
    report.table("t", ["b"], [[2]])
    assert report.finish(options) == 0
    report.check("c", 3, "4", kept=False)
    assert report.finish(options) == 1
    assert "python tools/x.py --model model\n" in capsys.readouterr().out
    assert [check["kept"] for check in json.loads((tmp_path / "f").read_text())["checks"]] == [
        True,
        False,
    ]


def test_growth_is_from_a_fifth_to_the_end():
    watch = MemoryWatch(None)
    watch.samples["p"] = [(t, 10.0 * t if t < 20 else 200.0 + t) for t in range(100)]
    assert watch.growth() == {"p": (222.0, 297.0)}


def test_trouble_in_a_log_is_seen(tmp_path):
    log = tmp_path / "log"
    quiet = "12:00:00 INFO    gateway: Error rates are low\nROSE serves\n"
    log.write_text(quiet)
    server = RunningServer("", log=log)
    assert server.troubles() == []
    trouble = [
        "12:00:01 WARNING engine: hot",
        "Traceback (most recent call last):",
        "ValueError: x",
    ]
    trouble.append("module.py:3: DeprecationWarning: old")
    log.write_text(quiet + "\n".join(trouble))
    assert server.troubles() == trouble


def test_texts_are_seeded_and_of_all_lengths():
    texts = mixed_texts(300, 1)
    assert texts == mixed_texts(300, 1) != mixed_texts(300, 2)
    words = [len(text.split()) for text in texts]
    assert min(words) == 1
    assert max(words) > 300
    lengths = skewed_lengths(4000, 0)
    assert (min(lengths), max(lengths)) == (8, 512)
    assert 115 < np.mean(lengths) < 135
    assert corpus_texts(None) == []
    rng = np.random.default_rng(0)
    assert len(text_of_tokens(rng, 7, lambda text: 2 + len(text.split())).split()) == 5


@pytest.mark.parametrize("url", ["http://example.org", "http://127.0.0.2.example.org:80", "/x"])
def test_only_this_machine_is_attacked(url):
    with pytest.raises(argparse.ArgumentTypeError):
        loopback_url(url)
    assert loopback_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("schema", "content", "finish", "fault"),
    [
        ("array", '["a", "b"]', "stop", ""),
        ("array", '["a"]', "stop", "too short"),
        ("array", '["a", "b"', "length", "ends by length"),
        ("array", '["a" "b"]', "stop", "is no JSON"),
        ("date", '{"day": "2024-02-31", "note": ""}', "stop", "is not a 'date'"),
        ("any_of", '{"city": "x", "year": 1}', "stop", "not valid under any"),
    ],
)
def test_an_answer_that_breaks_its_schema_is_seen(schema, content, finish, fault):
    found = fault_of(SCHEMAS[schema], content, finish)
    assert fault in found
    assert bool(fault) == bool(found)
