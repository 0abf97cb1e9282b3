"""Every attention back end against a naive float64 reference.

Each runs on the first device that it can use here, or of those that ROSE_TEST_DEVICES names. The back
ends for GPUs, which serve other shapes, are tested in `test_gpu_backends`.
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVPages,
    PagedLayout,
    RaggedLayout,
)

LENGTHS = (7, 1, 16, 70, 16, 16, 33, 2, 5, 29)
HEAD_DIM = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
WINDOWS = [(None, None), (3, None), (None, 2), (4, 9), (0, 0), (200, 200)]
# Every ratio of query to key/value heads in float32, one in the narrow types.
HEADS_AND_DTYPES = [
    (4, 4, torch.float32),
    (4, 2, torch.float32),
    (6, 2, torch.float32),
    (4, 1, torch.float32),
    (4, 2, torch.bfloat16),
    (4, 2, torch.float16),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors here are tiny: waiting for a second thread on a busy machine takes most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Subject:
    """A back end on a device that it can use."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        devices = os.environ.get("ROSE_TEST_DEVICES", " ".join(devices)).split()
        reasons: list[str] = []
        for device in map(torch.device, devices):
            for dtype in (torch.float32, torch.bfloat16):
                reasons = backend.unsupported(make_spec(4, 2), dtype, device)
                if not reasons:
                    self.device = device
                    return
        pytest.skip(f"{backend.name}: {'; '.join(reasons)}")

    def require(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        if reasons := self.backend.unsupported(spec, dtype, self.device):
            pytest.skip("; ".join(reasons))

    def ragged(self, lengths: tuple[int, ...]) -> AttentionBatch:
        return self.backend.plan_ragged(RaggedLayout(self.cumulated(lengths), lengths))

    def cumulated(self, lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths], device=self.device).cumsum(0).int()


def general_backends() -> list[str]:
    """Those that serve heads of any size; the others are tested in `test_gpu_backends`."""
    return [name for name in BACKENDS if name == "cpu" or name.startswith("torch_")]


@pytest.fixture(params=general_backends())
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(BACKENDS.load(request.param)())


def make_spec(heads: int, kv_heads: int, **facts: object) -> AttentionSpec:
    defaults = {"layer": 0, "head_dim": HEAD_DIM, "scale": 0.3, "causal": True}
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, **(defaults | facts))


@lru_cache(maxsize=64)
def make_qkv(
    tokens: int, spec: AttentionSpec, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (torch.randn(tokens, n, spec.head_dim, generator=generator) for n in heads)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def attend_f64(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of one sequence, by the definition."""
    ratio = spec.num_heads // spec.num_kv_heads
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(ratio, dim=1), v.repeat_interleave(ratio, dim=1)
    scores = torch.einsum("lhd,mhd->hlm", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    query, key = torch.arange(len(q))[:, None], torch.arange(len(k))
    if spec.bias is not None:
        scores = scores + spec.bias(key - query).double()
    left, right = spec.window
    right = 0 if spec.causal else right
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if left is not None:
        hidden |= key < query - left
    if right is not None:
        hidden |= key > query + right
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hlm,mhd->lhd", weights, v)


@lru_cache(maxsize=512)
def reference(lengths: tuple[int, ...], spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
    q, k, v = make_qkv(sum(lengths), spec, dtype)
    return torch.cat(
        [
            attend_f64(*one, spec)
            for one in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        ]
    )


class Pool:
    """Pages of NaN, some of which belong, in random order, to the sequences of a batch."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        page_size: int,
        spec: AttentionSpec,
        dtype: torch.dtype,
        device: torch.device,
        layers: int = 1,
    ) -> None:
        counts = [-(-length // page_size) for length in lengths]
        ids = list(range(1, sum(counts) + 3))
        random.Random(page_size).shuffle(ids)
        self.table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
        shape = (sum(counts) + 3, page_size, spec.num_kv_heads, spec.head_dim)

        def make() -> tuple[Tensor, ...]:
            return tuple(
                torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(layers)
            )

        self.pages = KVPages(make(), make())

    def slot(self, sequence: int, position: int) -> int:
        size = self.pages.page_size
        return int(self.table[sequence, position // size]) * size + position % size

    def layout(
        self, subject: Subject, query_lens: tuple[int, ...], kv_lens: tuple[int, ...]
    ) -> PagedLayout:
        slots = [
            self.slot(i, position)
            for i, (count, end) in enumerate(zip(query_lens, kv_lens, strict=True))
            for position in range(end - count, end)
        ]
        return PagedLayout(
            cu_seqlens_q=subject.cumulated(query_lens),
            query_lens=query_lens,
            kv_lens=kv_lens,
            block_table=self.table.to(subject.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=subject.device),
        )


Schedule = Callable[[tuple[int, ...]], Iterator[tuple[int, ...]]]


def one_shot(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield lengths


def in_chunks(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Steps in which sequences wait, begin, go on by a chunk, decode one token, or have ended."""
    rest, chance = list(lengths), random.Random(1)
    while any(rest):
        step = [min(n, chance.choice([0, 1, 1, 3, 8, 30])) for n in rest]
        rest = [n - taken for n, taken in zip(rest, step, strict=True)]
        if any(step):
            yield tuple(step)


def token_by_token(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for position in range(max(lengths)):
        yield tuple(int(position < n) for n in lengths)


def run_paged(
    subject: Subject,
    lengths: tuple[int, ...],
    spec: AttentionSpec,
    dtype: torch.dtype,
    page_size: int,
    schedule: Schedule,
) -> Tensor:
    pool = Pool(lengths, page_size, spec, dtype, subject.device)
    q, k, v = (x.to(subject.device) for x in make_qkv(sum(lengths), spec, dtype))
    out = torch.full_like(q, torch.nan)
    starts = list(itertools.accumulate(lengths, initial=0))
    done = [0] * len(lengths)
    for step in schedule(lengths):
        tokens = [starts[i] + done[i] + j for i, n in enumerate(step) for j in range(n)]
        done = [a + b for a, b in zip(done, step, strict=True)]
        batch = subject.backend.plan_paged(pool.layout(subject, step, tuple(done)), pool.pages)
        rows = torch.tensor(tokens, device=subject.device)
        out[rows] = batch.attend(q[rows], k[rows], v[rows], spec)
    return out


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Hold the largest error to `tolerance`, relative to the largest value where that is above 1."""
    assert actual.shape == expected.shape
    error = (actual.double().cpu() - expected.double().cpu()).abs()
    assert error.isfinite().all()
    assert error.max() <= tolerance * max(1.0, expected.abs().max().item())


class SlopedBias:
    """Another bias for each head, and for keys before and behind the query."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def __call__(self, distance: Tensor) -> Tensor:
        slope = torch.arange(1, self.heads + 1, device=distance.device) / self.heads
        return slope.view(-1, *[1] * distance.dim()) * (0.1 * distance - 0.2 * distance.abs())


def cases(*, causal: bool) -> Iterator[object]:
    for (heads, kv_heads, dtype), window, soft_cap in itertools.product(
        HEADS_AND_DTYPES, WINDOWS, [None, 2.0]
    ):
        spec = make_spec(heads, kv_heads, causal=causal, window=window, soft_cap=soft_cap)
        name = f"{heads}/{kv_heads}-{str(dtype)[6:]}-{window[0]},{window[1]}-cap{soft_cap}"
        yield pytest.param(spec, dtype, id=f"{'causal' if causal else 'full'}-{name}")


@pytest.mark.parametrize(("spec", "dtype"), [*cases(causal=False), *cases(causal=True)])
def test_ragged(subject: Subject, spec: AttentionSpec, dtype: torch.dtype):
    subject.require(spec, dtype)
    qkv = (x.to(subject.device) for x in make_qkv(sum(LENGTHS), spec, dtype))
    out = subject.ragged(LENGTHS).attend(*qkv, spec)
    assert out.dtype == dtype
    assert_near(out, reference(LENGTHS, spec, dtype), TOLERANCE[dtype])


BIASED = [
    pytest.param(
        make_spec(heads, kv_heads, causal=causal, window=window, bias=SlopedBias(heads)),
        id=f"{heads}/{kv_heads}-{'causal' if causal else 'full'}-{window[0]},{window[1]}",
    )
    for heads, kv_heads in ((4, 4), (6, 2))
    for causal in (False, True)
    for window in ((None, None), (4, 9))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", BIASED)
def test_ragged_with_a_bias_by_position(subject: Subject, spec: AttentionSpec, dtype: torch.dtype):
    subject.require(spec, dtype)
    qkv = (x.to(subject.device) for x in make_qkv(sum(LENGTHS), spec, dtype))
    out = subject.ragged(LENGTHS).attend(*qkv, spec)
    assert_near(out, reference(LENGTHS, spec, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("spec", BIASED)
def test_paged_with_a_bias_by_position(subject: Subject, spec: AttentionSpec):
    subject.require(spec, torch.float32)
    expected = reference(LENGTHS, spec, torch.float32)
    for schedule in (one_shot, in_chunks, token_by_token) if spec.causal else (one_shot,):
        out = run_paged(subject, LENGTHS, spec, torch.float32, 4, schedule)
        assert_near(out, expected, TOLERANCE[torch.float32])


def test_layers_of_one_batch_may_have_different_biases(subject: Subject):
    specs = [make_spec(4, 4, causal=False, bias=bias) for bias in (SlopedBias(4), None)]
    specs.append(make_spec(4, 4, causal=False, bias=SlopedBias(4), window=(3, 3)))
    for spec in specs:
        subject.require(spec, torch.float32)
    batch = subject.ragged(LENGTHS)
    for spec in specs:
        qkv = (x.to(subject.device) for x in make_qkv(sum(LENGTHS), spec, torch.float32))
        expected = reference(LENGTHS, spec, torch.float32)
        assert_near(batch.attend(*qkv, spec), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("spec", "dtype"), [*cases(causal=False), *cases(causal=True)])
def test_paged_in_one_shot(
    subject: Subject, spec: AttentionSpec, dtype: torch.dtype, page_size: int
):
    subject.require(spec, dtype)
    out = run_paged(subject, LENGTHS, spec, dtype, page_size, one_shot)
    assert_near(out, reference(LENGTHS, spec, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("spec", "dtype"), list(cases(causal=True)))
def test_paged_in_chunks(subject: Subject, spec: AttentionSpec, dtype: torch.dtype, page_size: int):
    subject.require(spec, dtype)
    out = run_paged(subject, LENGTHS, spec, dtype, page_size, in_chunks)
    assert_near(out, reference(LENGTHS, spec, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("spec", "dtype"), list(cases(causal=True)))
def test_paged_token_by_token(
    subject: Subject, spec: AttentionSpec, dtype: torch.dtype, page_size: int
):
    subject.require(spec, dtype)
    lengths = (19, 3, 12)
    out = run_paged(subject, lengths, spec, dtype, page_size, token_by_token)
    assert_near(out, reference(lengths, spec, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 80])
@pytest.mark.parametrize("schedule", [one_shot, in_chunks])
def test_heads_of_other_sizes(subject: Subject, head_dim: int, schedule: Schedule):
    lengths, dtype = (3, 150, 1, 40), torch.float32
    spec = make_spec(4, 2, head_dim=head_dim, scale=head_dim**-0.5)
    subject.require(spec, dtype)
    expected = reference(lengths, spec, dtype)
    qkv = (x.to(subject.device) for x in make_qkv(sum(lengths), spec, dtype))
    assert_near(subject.ragged(lengths).attend(*qkv, spec), expected, TOLERANCE[dtype])
    out = run_paged(subject, lengths, spec, dtype, 16, schedule)
    assert_near(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (64, 64), (100, 3)])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_long_sequences(subject: Subject, causal: bool, window, soft_cap):
    lengths = (300, 5, 391, 391)
    spec = make_spec(2, 1, causal=causal, window=window, soft_cap=soft_cap)
    dtype = torch.float32
    subject.require(spec, dtype)
    expected = reference(lengths, spec, dtype)
    qkv = (x.to(subject.device) for x in make_qkv(sum(lengths), spec, dtype))
    assert_near(subject.ragged(lengths).attend(*qkv, spec), expected, TOLERANCE[dtype])
    schedule = in_chunks if causal else one_shot
    out = run_paged(subject, lengths, spec, dtype, 16, schedule)
    assert_near(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (5, 5)])
@pytest.mark.parametrize("lengths", [LENGTHS, tuple(range(3, 33)), (16,) * 9], ids=len)
def test_row_of_a_batch_equals_the_single_run(subject: Subject, lengths, causal, window):
    spec = make_spec(4, 2, causal=causal, window=window)
    subject.require(spec, torch.float32)
    q, k, v = (x.to(subject.device) for x in make_qkv(sum(lengths), spec, torch.float32))
    batch = subject.ragged(lengths).attend(q, k, v, spec).split(lengths)
    for i, one in enumerate(zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)):
        assert_near(subject.ragged((lengths[i],)).attend(*one, spec), batch[i], 1e-6)


def test_decoded_row_equals_the_single_run(subject: Subject):
    spec, dtype = make_spec(4, 2), torch.float32
    subject.require(spec, dtype)
    together = run_paged(subject, LENGTHS, spec, dtype, 4, in_chunks).split(LENGTHS)
    qkv = make_qkv(sum(LENGTHS), spec, dtype)
    for i, (q, k, v) in enumerate(zip(*(x.split(LENGTHS) for x in qkv), strict=True)):
        pool = Pool((len(q),), 4, spec, dtype, subject.device)
        for end in range(1, len(q) + 1):
            batch = subject.backend.plan_paged(pool.layout(subject, (1,), (end,)), pool.pages)
            new = (x[end - 1 : end].to(subject.device) for x in (q, k, v))
            assert_near(batch.attend(*new, spec), together[i][end - 1 : end], 1e-6)


@pytest.mark.parametrize("bad", [0, 3, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_of_one_sequence_stays_there(subject: Subject, bad: int, causal: bool):
    lengths = (9, 12, 13, 14, 15, 16, 17, 10, 11)
    spec = make_spec(4, 2, causal=causal)
    subject.require(spec, torch.float32)
    q, k, v = (x.to(subject.device).clone() for x in make_qkv(sum(lengths), spec, torch.float32))
    for x in (q, k, v):
        x.split(lengths)[bad].fill_(torch.nan)
    out = subject.ragged(lengths).attend(q, k, v, spec).split(lengths)
    expected = reference(lengths, spec, torch.float32).split(lengths)
    assert out[bad].isnan().all()
    for i in set(range(len(lengths))) - {bad}:
        assert_near(out[i], expected[i], TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "lengths",
    [(0,), (0, 0), (0, 5), (5, 0), (0, 5, 0, 0, 5, 7, 0), (3, 0, 3), (0, 0, 1)],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_empty_sequences(subject: Subject, lengths: tuple[int, ...]):
    spec, dtype = make_spec(4, 2), torch.float32
    subject.require(spec, dtype)
    q, k, v = (x.to(subject.device) for x in make_qkv(sum(lengths), spec, dtype))
    expected = reference(lengths, spec, dtype)
    out = subject.ragged(lengths).attend(q, k, v, spec)
    assert out.shape == q.shape
    pool = Pool(lengths, 4, spec, dtype, subject.device)
    batch = subject.backend.plan_paged(pool.layout(subject, lengths, lengths), pool.pages)
    paged = batch.attend(q, k, v, spec)
    assert paged.shape == q.shape
    if sum(lengths):
        assert_near(out, expected, TOLERANCE[dtype])
        assert_near(paged, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", [(21,), LENGTHS, (8, 8, 8)], ids=len)
def test_one_plan_serves_unlike_layers(subject: Subject, lengths: tuple[int, ...]):
    """Layers of one model differ in window and cap; keys and values are views of a fused result."""
    dtype = torch.float32
    specs = [
        make_spec(4, 2, layer=0, window=(2, 2), causal=False),
        make_spec(4, 2, layer=1, causal=False),
        make_spec(4, 2, layer=2, window=(2, 2), causal=False),
        make_spec(4, 2, layer=3, window=(3, None)),
        make_spec(4, 2, layer=4, soft_cap=2.0),
    ]
    pool = Pool(lengths, 4, specs[0], dtype, subject.device, layers=len(specs))
    ragged = subject.ragged(lengths)
    paged = subject.backend.plan_paged(pool.layout(subject, lengths, lengths), pool.pages)
    for seed, spec in enumerate(specs):
        subject.require(spec, dtype)
        qkv = torch.cat(make_qkv(sum(lengths), spec, dtype, seed), dim=1).to(subject.device)
        q, k, v = qkv.split([4, 2, 2], dim=1)
        parts = (x.cpu().split(lengths) for x in (q, k, v))
        expected = torch.cat([attend_f64(*one, spec) for one in zip(*parts, strict=True)])
        assert_near(ragged.attend(q, k, v, spec), expected, TOLERANCE[dtype])
        assert_near(paged.attend(q, k, v, spec), expected, TOLERANCE[dtype])


def test_decode_of_unlike_layers(subject: Subject):
    """One decode step over layers with and without a window, more of them than sequences."""
    dtype, lengths = torch.float32, (40, 3, 25, 26)
    specs = [
        make_spec(4, 2, layer=i, window=(6, None) if i % 2 else (None, None)) for i in range(5)
    ]
    pool = Pool(lengths, 4, specs[0], dtype, subject.device, layers=len(specs))
    before = tuple(n - 1 for n in lengths)
    first = subject.backend.plan_paged(pool.layout(subject, before, before), pool.pages)
    step = (1,) * len(lengths)
    second = subject.backend.plan_paged(pool.layout(subject, step, lengths), pool.pages)
    for seed, spec in enumerate(specs):
        subject.require(spec, dtype)
        sequences = list(
            zip(*(x.split(lengths) for x in make_qkv(sum(lengths), spec, dtype, seed)), strict=True)
        )
        prompt = [
            torch.cat([one[i][:-1] for one in sequences]).to(subject.device) for i in range(3)
        ]
        token = [torch.cat([one[i][-1:] for one in sequences]).to(subject.device) for i in range(3)]
        first.attend(*prompt, spec)
        expected = torch.cat([attend_f64(*one, spec)[-1:] for one in sequences])
        assert_near(second.attend(*token, spec), expected, TOLERANCE[dtype])


def test_writes_only_the_slots_of_the_batch(subject: Subject):
    spec, dtype = make_spec(4, 2), torch.float32
    subject.require(spec, dtype)
    lengths = (6, 3)
    pool = Pool(lengths, 4, spec, dtype, subject.device)
    q, k, v = (x.to(subject.device) for x in make_qkv(sum(lengths), spec, dtype))
    layout = pool.layout(subject, lengths, lengths)
    subject.backend.plan_paged(layout, pool.pages).attend(q, k, v, spec)
    for pages, new in ((pool.pages.keys[0], k), (pool.pages.values[0], v)):
        slots = pages.flatten(0, 1)
        assert torch.equal(slots[layout.slot_mapping], new)
        assert int(slots.isfinite().all(-1).all(-1).sum()) == sum(lengths)


def test_says_why_it_cannot_serve(subject: Subject):
    assert subject.backend.unsupported(make_spec(5, 2), torch.float32, subject.device)
    assert subject.backend.unsupported(make_spec(4, 2), torch.int32, subject.device)
    negative = make_spec(4, 2, window=(-1, None))
    assert subject.backend.unsupported(negative, torch.float32, subject.device)


def test_reasons_of_torch_sdpa_name_what_was_found():
    backend = BACKENDS.load("torch_sdpa")()
    cpu = torch.device("cpu")
    assert backend.unsupported(make_spec(4, 2), torch.bfloat16, cpu) == []
    bad = make_spec(5, 2, window=(None, -3), soft_cap=0.0)
    reasons = backend.unsupported(bad, torch.int8, cpu)
    assert len(reasons) == 4
    for word in ("int8", "5 query heads", "(None, -3)", "0.0"):
        assert sum(word in reason for reason in reasons) == 1
    assert backend.unsupported(make_spec(4, 2), torch.float32, torch.device("meta"))
