"""How the torch back end groups sequences, and which torch operations a layer costs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rose.kernels.attention.base import (
    AttentionBatch,
    AttentionSpec,
    KVPages,
    PagedLayout,
    RaggedLayout,
)
from rose.kernels.attention.dense import WINDOW_BLOCK, attend_dense, attend_windowed, band_bias
from rose.kernels.attention.grouping import PADDING_RATIO, PADDING_SLACK, group_sequences
from rose.kernels.attention.torch_sdpa import TorchSdpaBackend

HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors here are tiny: waiting for a second thread on a busy machine takes most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def members(query_lens: list[int], kv_lens: list[int], short: int = 32) -> list[tuple[int, ...]]:
    return [group.members for group in group_sequences(query_lens, kv_lens, short=short)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([9], [(0,)]),
        ([9, 9, 9], [(0, 1, 2)]),
        ([0, 9, 0, 9, 0], [(1, 3)]),
        ([100, 100, 90, 100], [(0, 1), (2,), (3,)]),
        ([100, 20, 100], [(0,), (1,), (2,)]),
    ],
)
def test_fresh_sequences_share_a_group_where_no_copy_is_needed(lengths, expected):
    assert members(lengths, lengths) == expected


def test_many_short_sequences_share_groups():
    lengths = [20, 30, 19, 100, 29, 18, 28, 27, 20]
    assert members(lengths, lengths) == [(3,), (0, 2, 5, 8), (1, 4, 6, 7)]
    assert len(members(lengths, lengths, short=10)) == len(lengths)


def test_decodes_share_a_group_where_lengths_are_alike():
    assert members([1] * 4, [500, 90, 480, 100]) == [(1, 3), (0, 2)]


def test_cached_sequences_share_a_group_with_as_many_queries():
    assert members([1, 8, 1, 8, 5], [50, 50, 51, 51, 5]) == [(4,), (0, 2), (1, 3)]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), max_size=30), st.integers(0, 60)
)
def test_every_busy_sequence_is_in_one_group_with_bounded_padding(lengths, short):
    query_lens = [query for query, _ in lengths]
    kv_lens = [query + cached for query, cached in lengths]
    groups = group_sequences(query_lens, kv_lens, short=short)
    assert sorted(i for group in groups for i in group.members) == [
        i for i, query in enumerate(query_lens) if query
    ]
    for group in groups:
        assert group.query_lens == tuple(query_lens[i] for i in group.members)
        assert group.kv_lens == tuple(kv_lens[i] for i in group.members)
        real = sum(q * kv for q, kv in zip(group.query_lens, group.kv_lens, strict=True))
        padded = len(group.members) * group.shape[0] * group.shape[1]
        assert padded <= PADDING_RATIO * real + PADDING_SLACK
        assert group.is_fresh == (group.query_lens == group.kv_lens)
        if not group.is_fresh:
            assert len(set(group.query_lens)) == 1
        elif not group.is_uniform:
            assert group.shape[0] <= short


class Recorder(TorchDispatchMode):
    """Collects the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


COPIES = {"index_select", "index", "gather", "cat", "clone", "copy_", "index_copy_", "_to_copy"}


def operations(batch: AttentionBatch, tokens: int, spec: AttentionSpec) -> list[str]:
    """Names of the operations of a layer that is not the first."""
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    with torch.inference_mode():
        batch.attend(*qkv, spec)
        with Recorder() as recorder:
            batch.attend(*qkv, spec)
    return recorder.names


def make_spec(**facts) -> AttentionSpec:
    defaults = {"layer": 0, "head_dim": DIM, "scale": 0.3, "causal": False}
    return AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, **(defaults | facts))


@pytest.mark.parametrize("lengths", [(50,), (1,), (16,) * 20, (0, 50)])
@pytest.mark.parametrize("spec", [make_spec(), make_spec(causal=True), make_spec(window=(4, 4))])
def test_equal_lengths_are_attended_at_once_without_copies(lengths, spec):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = TorchSdpaBackend().plan_ragged(RaggedLayout(cu_seqlens, lengths))
    names = operations(batch, sum(lengths), spec)
    assert sum("scaled_dot_product" in name for name in names) == 1
    assert not COPIES & set(names)


def decode_batch(kv_lens: tuple[int, ...], table: list[list[int]]) -> AttentionBatch:
    size, count = 4, len(kv_lens)
    pages = torch.zeros(40, size, KV_HEADS, DIM)
    slots = [table[i][(n - 1) // size] * size + (n - 1) % size for i, n in enumerate(kv_lens)]
    layout = PagedLayout(
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32),
        query_lens=(1,) * count,
        kv_lens=kv_lens,
        block_table=torch.tensor(table, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
    )
    return TorchSdpaBackend().plan_paged(layout, KVPages((pages,), (pages.clone(),)))


def test_one_stream_reads_adjacent_pages_in_place():
    names = operations(decode_batch((11,), [[3, 4, 5]]), 1, make_spec(causal=True))
    assert names.count("index_copy_") == 2
    assert not (COPIES - {"index_copy_"}) & set(names)


def test_a_decode_step_takes_as_few_calls_as_one_stream():
    table = [[1, 2, 3], [9, 8, 7], [4, 6, 5], [12, 11, 10]]
    names = operations(decode_batch((11, 9, 12, 10), table), 4, make_spec(causal=True))
    assert sum("scaled_dot_product" in name for name in names) == 1
    assert names.count("index_select") == 2


@pytest.mark.parametrize("length", [WINDOW_BLOCK, 2 * WINDOW_BLOCK, 2 * WINDOW_BLOCK + 1, 700])
@pytest.mark.parametrize("window", [(0, 0), (20, 3), (150, 150)])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_blocks_of_a_window_equal_one_dense_call(length, window, soft_cap):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, length, 2, 8),
        torch.randn(2, length, 1, 8),
        torch.randn(2, length, 1, 8),
    )
    distance = torch.arange(length) - torch.arange(length)[:, None]
    hidden = (distance < -window[0]) | (distance > window[1])
    bias = torch.zeros(1, 1, length, length).masked_fill_(hidden, float("-inf"))
    band = band_bias(length, window, q.dtype, q.device)
    assert band.shape[0] == (length if length <= 2 * WINDOW_BLOCK else WINDOW_BLOCK)
    dense = attend_dense(q, k, v, scale=0.3, soft_cap=soft_cap, bias=bias)
    blocks = attend_windowed(q, k, v, band, window, scale=0.3, soft_cap=soft_cap)
    assert (dense - blocks).abs().max() <= 2e-6


def test_capped_scores_stay_within_the_memory_bound(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 30, 4, 8), torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 8)
    whole = attend_dense(q, k, v, scale=0.3, soft_cap=2.0)
    monkeypatch.setattr("rose.kernels.attention.dense.SCORE_ELEMENTS", 2 * 4 * 30 * 7)
    blocks = attend_dense(q, k, v, scale=0.3, soft_cap=2.0)
    assert (whole - blocks).abs().max() <= 1e-6
