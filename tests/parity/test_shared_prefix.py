"""Beginnings that texts share are computed once, and change nothing but the time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose import Engine
from rose.kernels.attention import BACKENDS
from rose.models.loader import load
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.kv_pool import allocate_pages
from rose.runtime.scoring import ScoringModel
from rose.runtime.shared_prefix import MIN_SHARED_TOKENS, find_runs, share_prefixes
from rose.runtime.worker import DeviceWorker
from tests import tiny
from tests.parity.test_classifiers import save_ranker

PAGE = 16


def pack(texts):
    lengths = np.array([len(text) for text in texts], np.int32)
    return EmbedBatch(np.concatenate(texts), lengths, np.zeros(len(texts), np.int32))


def make_texts(*groups, seed=0, vocab=70):
    """Texts of groups (shared tokens, lengths of the rests)."""
    rng = np.random.default_rng(seed)
    texts = []
    for shared, rests in groups:
        head = rng.integers(0, vocab, shared, dtype=np.int32)
        texts += [
            np.concatenate([head, rng.integers(0, vocab, rest, dtype=np.int32)]) for rest in rests
        ]
    return texts


BATCHES = {
    "one query": [(70, (5, 30, 1, 17, 64))],
    "two queries": [(70, (5, 30, 9)), (40, (3, 3, 28))],
    "a text alone between": [(64, (5, 8, 8)), (0, (50,)), (48, (1, 2, 9))],
    "equal texts": [(90, (0, 0, 0))],
    "one within another": [(64, (0, 20, 40))],
}


@given(
    st.lists(
        st.tuples(st.integers(0, 90), st.lists(st.integers(1, 60), min_size=1, max_size=5)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1, 7, 16]),
)
def test_runs_are_of_texts_that_begin_alike(groups, page_size):
    texts = make_texts(*groups, vocab=3)
    runs = list(find_runs(texts, page_size))
    assert [run.first for run in runs] == [0, *(run.last for run in runs[:-1])]
    assert runs[-1].last == len(texts)
    for run in runs:
        members = texts[run.first : run.last]
        assert run.shared % page_size == 0
        assert (run.shared >= MIN_SHARED_TOKENS) == (len(members) > 1)
        for text in members:
            assert len(text) > run.shared
            assert (text[: run.shared] == members[0][: run.shared]).all()


@pytest.mark.parametrize("name", BATCHES)
def test_every_token_has_a_place_of_its_own(name):
    texts = make_texts(*BATCHES[name])
    shared = share_prefixes(pack(texts), PAGE)
    slots = shared.slots(PAGE)
    assert len(set(slots.tolist())) == len(slots) == shared.query_lens.sum()
    assert slots.min() >= PAGE  # page 0 is reserved
    assert slots.max() < shared.num_pages * PAGE
    assert len(slots) < sum(map(len, texts))
    written = dict(zip(slots.tolist(), shared.ids.tolist(), strict=True))
    for text, sequence in zip(texts, shared.texts, strict=True):
        assert shared.kv_lens[sequence] == len(text)
        places = shared.block_table[sequence].repeat(PAGE) * PAGE + np.tile(
            np.arange(PAGE), shared.block_table.shape[1]
        )
        assert [written[slot] for slot in places[: len(text)].tolist()] == text.tolist()


@pytest.mark.parametrize(
    "groups", [[(0, (40, 50))], [(31, (20, 20))], [(100, (5,))], [(40, (300, 300))]]
)
def test_what_saves_too_little_is_left_alone(groups):
    assert share_prefixes(pack(make_texts(*groups)), PAGE) is None


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {}

    def get(kind) -> Path:
        if kind not in made:
            made[kind] = save_ranker(folder / kind, kind, max_position_embeddings=1024)
        return made[kind]

    return get


def runtimes(path, backend, num_pages=400):
    loaded = load(path, tasks=("score",))
    worker = DeviceWorker()
    plain, sharing = (
        EmbeddingRuntime(ScoringModel(loaded.classifier), BACKENDS.load(backend)(), worker)
        for _ in range(2)
    )
    specs = loaded.backbone.attention_specs
    pages = allocate_pages(specs, num_pages, PAGE, loaded.dtype, loaded.device)
    sharing.share_prefixes(BACKENDS.load(backend)(), pages)
    return worker, plain, sharing


@pytest.mark.parametrize("backend", ["torch_sdpa", "cpu"])
@pytest.mark.parametrize("kind", list(tiny.DECODERS))
def test_scores_are_those_without_sharing(models, kind, backend):
    worker, plain, sharing = runtimes(models(kind), backend)
    try:
        for groups in BATCHES.values():
            batch = pack(make_texts(*groups))
            assert share_prefixes(batch, PAGE) is not None
            expected, found = plain.step(batch).result(), sharing.step(batch).result()
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        again = sharing.step(batch).result()
        assert torch.equal(again, found)
    finally:
        worker.close()


def test_what_the_pages_cannot_hold_runs_as_it_is(models):
    worker, plain, sharing = runtimes(models("qwen3"), "torch_sdpa", num_pages=4)
    try:
        batch = pack(make_texts(*BATCHES["one query"]))
        assert torch.equal(sharing.step(batch).result(), plain.step(batch).result())
    finally:
        worker.close()


def test_an_engine_shares_the_prompt_of_a_query(models, monkeypatch):
    """Fewer tokens go through the backbone, and the scores are those of each document alone."""
    documents = ["a red kite", "tea", "no idea at all", "a" * 90, ""]
    with Engine(models("qwen3"), device="cpu", dtype="float32", tasks=("score",)) as engine:
        counts = []
        backbone = engine._served.loaded.backbone
        forward = type(backbone).forward

        def counted(self, batch):
            counts.append(len(batch.input_ids))
            return forward(self, batch)

        alone = [engine.score("who keeps kites", [document])[0] for document in documents]
        monkeypatch.setattr(type(backbone), "forward", counted)
        together = engine.score("who keeps kites", documents)
        ranker = engine.ranker()
        from rose.serving.local_ranking import PairOptions

        whole = ranker.encode("who keeps kites", documents, PairOptions()).tokens
        assert sum(counts) < whole / 2
        np.testing.assert_allclose(together, alone, atol=1e-5)
    exact = Engine(
        models("qwen3"), device="cpu", dtype="float32", tasks=("score",), deterministic=True
    )
    with exact as engine:
        assert not engine._served.scoring.shares_prefixes
        single = [engine.score("who keeps kites", [document])[0] for document in documents]
        assert engine.score("who keeps kites", documents).tolist() == single
