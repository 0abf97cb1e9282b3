"""In this process: texts through a runtime, and ranking by the vectors of their tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rose import Engine
from rose.runtime.errors import NonFiniteError, RequestError
from rose.serving import local_late
from rose.serving.local_outputs import run_outputs
from rose.serving.local_ranking import PairOptions
from rose.serving.local_rows import run_rows
from tests import late_checkpoints as late

NAN_ID = 99
QUERIES = ["red kite", "a", "green tea", "the sea", ""]
DOCUMENTS = ["red kite over the sea.", "a", "green tea, the green tea", "short text", "red, kite"]


class Runtime:
    """A text's row is (sum of its ids, their number), and a token's (its id, 1)."""

    shares_prefixes = False

    def __init__(self):
        self.batches = []

    def step(self, batch):
        self.batches.append(batch.lengths.tolist())
        return SimpleNamespace(result=lambda: self.output(batch, "text"))

    def step_all(self, batch):
        self.batches.append(batch.lengths.tolist())
        return SimpleNamespace(result=lambda: tuple(self.output(batch, o) for o in batch.outputs))

    def output(self, batch, output):
        texts = np.split(batch.ids, np.cumsum(batch.lengths)[:-1])
        if output != "text":
            texts = [np.array([token]) for token in batch.ids]
        rows = [[float("nan") if NAN_ID in t else float(t.sum()), float(len(t))] for t in texts]
        return torch.tensor(rows)


def texts(*lengths):
    return [np.full(length, i + 1, np.int32) for i, length in enumerate(lengths)]


def rows_of(ids, **options):
    runtime = Runtime()
    return run_rows(runtime, ids, width=2, batch_tokens=8, **options), runtime.batches


def test_rows_keep_the_order_of_the_texts():
    ids, done = texts(2, 5, 1, 5, 3), []
    rows, batches = rows_of(ids, progress=lambda *counts: done.append(counts))
    assert rows.tolist() == [[row.sum(), len(row)] for row in ids]
    assert batches == [[5], [5, 3], [2, 1]]
    assert done == [(1, 5), (3, 5), (5, 5)]


def test_one_text_is_run_by_itself():
    done = []
    rows, batches = rows_of(texts(3), progress=lambda *counts: done.append(counts))
    assert (rows.tolist(), batches, done) == ([[3, 3]], [[3]], [(1, 1)])


def test_texts_that_begin_alike_stay_side_by_side(monkeypatch):
    monkeypatch.setattr(Runtime, "shares_prefixes", True)
    rows, batches = rows_of(ids := texts(2, 5, 1, 5))
    assert rows.tolist() == [[row.sum(), len(row)] for row in ids]
    assert batches == [[2, 5, 1], [5]]


@pytest.mark.parametrize("count", [1, 5])
def test_what_is_not_finite_is_named_by_its_text(count):
    ids = texts(2, 5, 1, 5, 3)[-count:]
    ids[-1] = np.array([1, NAN_ID, 1], np.int32)
    with pytest.raises(NonFiniteError) as failed:
        rows_of(ids)
    assert failed.value.field == f"input[{count - 1}]"
    for outputs in (("text",), ("hidden_states",), ("text", "hidden_states")):
        found = {}
        with pytest.raises(NonFiniteError) as failed:
            found.update(run_outputs(Runtime(), ids, outputs, batch_tokens=8))
        assert failed.value.field == f"input[{count - 1}]"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = late.save_pylate(tmp_path_factory.mktemp("late") / "model", "bert")
    with Engine(folder, device="cpu", max_batch_tokens=64) as engine:
        yield engine


def test_queries_of_their_own_are_held_a_few_at_a_time(engine, monkeypatch):
    expected = engine.score(QUERIES, DOCUMENTS)
    monkeypatch.setattr(local_late, "MAX_QUERY_NUMBERS", 2 * late.WIDTH * 16)
    called, done, run = [], [], local_late.LateRanker._vectors

    def noted(self, ids, side):
        called.append((side, len(ids)))
        return run(self, ids, side)

    monkeypatch.setattr(local_late.LateRanker, "_vectors", noted)
    found = engine.score(QUERIES, DOCUMENTS, progress=lambda *counts: done.append(counts))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert called == [("query", 2), ("document", 2)] * 2 + [("query", 1), ("document", 1)]
    assert done == [(i + 1, 5) for i in range(5)]


def test_lists_of_several_queries_are_scored_together(engine, monkeypatch):
    monkeypatch.setattr(local_late, "MAX_QUERY_NUMBERS", 2 * late.WIDTH * 16)
    ranker = engine.ranker()
    lists = [(query, DOCUMENTS[: i + 1]) for i, query in enumerate(QUERIES[:3])]
    parts = [ranker.encode(*pair, PairOptions()) for pair in lists]
    expected = np.concatenate([ranker.raw(part) for part in parts])
    np.testing.assert_allclose(ranker.raw(ranker.joined(parts)), expected, atol=1e-5)


def test_a_model_that_is_not_served_to_score_says_so(tmp_path):
    folder = late.save_pylate(tmp_path / "model", "bert")
    with Engine(folder, device="cpu", tasks=("embed",)) as engine:
        for ask in (lambda: engine.score("red", ["a"]), lambda: engine.rank("red", ["a"])):
            with pytest.raises(RequestError, match="cannot score; it can: embed"):
                ask()
