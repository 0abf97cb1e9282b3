"""Packing of texts, and their order, without a real model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.kernels.attention.torch_sdpa import TorchSdpaBackend
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.queue import EmbedJob, JobSlice
from rose.runtime.worker import DeviceWorker

FIELDS = ("ids", "lengths", "pool_from")


def batch_of(texts, pool_from=0):
    lengths = np.array([len(text) for text in texts], np.int32)
    job = EmbedJob(np.concatenate([np.array(text, np.int32) for text in texts]), lengths, pool_from)
    return EmbedBatch.of_slices([JobSlice(job, 0, len(texts))])


def split(batch):
    return [ids.tolist() for ids in np.split(batch.ids, np.cumsum(batch.lengths)[:-1])]


texts = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=9)


@given(texts, st.randoms())
def test_take_reorders_whole_texts(items, random):
    order = list(range(len(items)))
    random.shuffle(order)
    taken = batch_of(items).take(np.array(order))
    assert split(taken) == [items[i] for i in order]
    assert taken.lengths.tolist() == [len(items[i]) for i in order]


@given(texts)
def test_singles_are_the_texts(items):
    assert [single.ids.tolist() for single in batch_of(items).singles()] == items


class Echo:
    """A model whose vector is (first id, length, position sum, pool_from)."""

    def __init__(self):
        self.lengths = []

    def __call__(self, tokens, cu_seqlens, pool_from):
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        self.lengths.append((ends - starts).tolist())
        sums = [tokens.positions[s:e].sum() for s, e in zip(starts, ends, strict=True)]
        skipped = torch.zeros(len(starts)) if pool_from is None else pool_from.float()
        columns = [
            tokens.input_ids[starts].float(),
            (ends - starts).float(),
            torch.stack(sums).float(),
        ]
        return torch.stack([*columns, skipped], dim=1)


def run(items, pool_from=0, **options):
    worker, model = DeviceWorker(), Echo()
    try:
        runtime = EmbeddingRuntime(model, TorchSdpaBackend(), worker, **options)
        return runtime.step(batch_of(items, pool_from)).result(10), model
    finally:
        worker.close()


def test_rows_come_back_in_the_order_of_the_texts_and_equal_lengths_run_side_by_side():
    items = [[7] * 3, [8], [9] * 3, [5] * 2, [6]]
    vectors, model = run(items)
    expected = [[text[0], len(text), sum(range(len(text))), 0] for text in items]
    assert vectors.tolist() == expected
    assert model.lengths == [[1, 1, 2, 3, 3]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_not_pooled_stays_with_its_text(deterministic):
    short, long = batch_of([[1, 2], [3, 4, 5]], pool_from=1), batch_of([[6, 7, 8]], pool_from=2)
    mixed = EmbedBatch(
        *[np.concatenate([getattr(b, name) for b in (long, short)]) for name in FIELDS]
    )
    worker = DeviceWorker()
    try:
        runtime = EmbeddingRuntime(Echo(), TorchSdpaBackend(), worker, deterministic=deterministic)
        vectors = runtime.step(mixed).result(10)
    finally:
        worker.close()
    assert vectors[:, [0, 3]].tolist() == [[6, 2], [1, 1], [3, 1]]


def test_deterministic_runs_each_text_alone():
    items = [[7] * 3, [8], [9] * 3]
    vectors, model = run(items, deterministic=True)
    assert vectors[:, 0].tolist() == [7, 8, 9]
    assert model.lengths == [[3], [1], [3]]


def test_saturation_is_measured_within_its_budget():
    worker = DeviceWorker()
    try:
        runtime = EmbeddingRuntime(Echo(), TorchSdpaBackend(), worker)
        assert 512 <= runtime.measure_saturation(max_len=64, vocab_size=100) <= 8192
    finally:
        worker.close()
