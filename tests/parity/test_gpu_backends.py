"""The GPU back ends against a naive float64 reference.

Where a library and its device are there, the real thing is tested; elsewhere a stand-in for the
library checks how it is called and computes with torch, and the test's name says so.
"""

import itertools
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    FixedBatch,
    GraphSupport,
    KVPages,
    PagedLayout,
    RaggedLayout,
)
from rose.kernels.attention.stored import StoredAttention
from tests.parity.stand_ins import flashinfer_stand_in
from tests.parity.stand_ins.backends import STAND_INS
from tests.parity.test_attention_backends import (
    Pool,
    SlopedBias,
    assert_near,
    attend_f64,
    in_chunks,
    make_qkv,
    one_shot,
    token_by_token,
)

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Libraries that compile a module for each head size, dtype, window or none, and cap or none, take a
# minute for each: with ROSE_FEW_SHAPES=1 the tests keep to one head size and dtype.
FEW = os.environ.get("ROSE_FEW_SHAPES") == "1"
LENGTHS = (7, 1, 16, 70, 16, 33, 2, 29)
CUDA = torch.device("cuda")


def make_backend(name: str) -> tuple[AttentionBackend, torch.device]:
    """The back end itself where it can serve a usual layer, else the one with a stand-in."""
    if torch.cuda.is_available():
        backend = BACKENDS.load(name)()
        if not backend.unsupported(spec_of(4, 2), torch.bfloat16, CUDA):
            return backend, CUDA
    return STAND_INS[name](), torch.device("cpu")


def spec_of(heads: int, kv_heads: int, **facts: object) -> AttentionSpec:
    defaults = {"layer": 0, "head_dim": 128, "scale": 0.1, "causal": True}
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, **(defaults | facts))


def test_id(name: str) -> str:
    return make_backend(name)[0].name


test_id.__test__ = False  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Subject:
    """A back end on a device, with what tests ask of it. Its interface is that of `Pool.layout`."""

    def __init__(self, name: str) -> None:
        self.backend, self.device = make_backend(name)
        self.page_size = 256 if name == "flash-attn-2" else 4

    def serves(self, spec: AttentionSpec, dtype: torch.dtype = torch.bfloat16) -> bool:
        return not self.backend.unsupported(spec, dtype, self.device)

    def serves_pages(self, spec: AttentionSpec, page_size: int) -> bool:
        return not self.backend.unsupported_paged(spec, torch.bfloat16, self.device, page_size)

    def cumulated(self, lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths], device=self.device).cumsum(0).int()

    def ragged(self, lengths: tuple[int, ...]) -> AttentionBatch:
        return self.backend.plan_ragged(RaggedLayout(self.cumulated(lengths), lengths))

    def pool(
        self,
        lengths: tuple[int, ...],
        spec: AttentionSpec,
        dtype: torch.dtype = torch.bfloat16,
        layers: int = 1,
        page_size: int | None = None,
    ) -> Pool:
        pool = Pool(lengths, page_size or self.page_size, spec, dtype, self.device, layers)
        for pages in (*pool.pages.keys, *pool.pages.values):
            pages.zero_()  # kernels weigh what lies behind a sequence with 0, which NaN survives
        return pool


@pytest.fixture(params=sorted(STAND_INS), ids=test_id)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param)


@pytest.fixture(params=sorted(STAND_INS.keys() - {"torch-flash"}), ids=test_id)
def paged_subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param)


def expected_of(qkv: tuple[Tensor, ...], lengths: tuple[int, ...], spec: AttentionSpec) -> Tensor:
    parts = (x.cpu().split(lengths) for x in qkv)
    return torch.cat([attend_f64(*one, spec) for one in zip(*parts, strict=True)])


SHAPES = [
    (4, 4, 64, torch.bfloat16),
    (4, 2, 128, torch.float16),
    (4, 1, 64, torch.bfloat16),
    (6, 2, 64, torch.float16),
    (5, 1, 64, torch.bfloat16),
    (2, 1, 256, torch.bfloat16),
    (4, 4, 32, torch.float16),
    (2, 2, 72, torch.bfloat16),
]
KINDS = [
    {"causal": causal, "window": window, "soft_cap": soft_cap}
    for causal, window, soft_cap in itertools.product(
        [True, False], [(None, None), (3, None), (4, 9)], [None, 2.0]
    )
]
if FEW:
    SHAPES = [(heads, kv_heads, 128, torch.bfloat16) for heads, kv_heads, _, _ in SHAPES]
    KINDS = [kind for kind in KINDS if kind["window"] == (None, None) and not kind["soft_cap"]]
SPECS = [
    *((spec_of(h, k, head_dim=d), dtype) for h, k, d, dtype in SHAPES),
    *((spec_of(h, k, head_dim=d, causal=False), dtype) for h, k, d, dtype in SHAPES),
    *((spec_of(4, 2, **kind), torch.bfloat16) for kind in KINDS),
]


def name_of(case: object) -> str | None:
    if isinstance(case, AttentionSpec):
        kind = "causal" if case.causal else "full"
        window = ",".join(map(str, case.window))
        return (
            f"{kind}-{case.num_heads}/{case.num_kv_heads}x{case.head_dim}-{window}-{case.soft_cap}"
        )
    return str(case)[6:]


def test_ragged(subject: Subject):
    served = [(spec, dtype) for spec, dtype in SPECS if subject.serves(spec, dtype)]
    assert len(served) >= 10
    for spec, dtype in served:
        qkv = make_qkv(sum(LENGTHS), spec, dtype)
        out = subject.ragged(LENGTHS).attend(*(x.to(subject.device) for x in qkv), spec)
        assert out.dtype == dtype
        assert_near(out, expected_of(qkv, LENGTHS, spec), TOLERANCE[dtype])


def run_paged(
    subject: Subject,
    lengths: tuple[int, ...],
    spec: AttentionSpec,
    dtype: torch.dtype,
    page_size: int,
    schedule: Callable[[tuple[int, ...]], object],
) -> Tensor:
    pool = subject.pool(lengths, spec, dtype, page_size=page_size)
    qkv = [x.to(subject.device) for x in make_qkv(sum(lengths), spec, dtype)]
    out = torch.full_like(qkv[0], torch.nan)
    starts = list(itertools.accumulate(lengths, initial=0))
    done = [0] * len(lengths)
    for step in schedule(lengths):
        rows = torch.tensor(
            [starts[i] + done[i] + j for i, n in enumerate(step) for j in range(n)],
            device=subject.device,
        )
        done = [a + b for a, b in zip(done, step, strict=True)]
        batch = subject.backend.plan_paged(pool.layout(subject, step, tuple(done)), pool.pages)
        out[rows] = batch.attend(*(x[rows] for x in qkv), spec)
    return out


@pytest.mark.parametrize("schedule", [one_shot, in_chunks, token_by_token])
def test_paged(paged_subject: Subject, schedule: Callable[[tuple[int, ...]], object]):
    served = [(spec, dtype) for spec, dtype in SPECS if paged_subject.serves(spec, dtype)]
    if schedule is not one_shot:  # an earlier token would not have seen the later ones
        served = [(spec, dtype) for spec, dtype in served if spec.causal]
    lengths = (19, 3, 12) if schedule is token_by_token else LENGTHS
    assert len(served) >= 5
    for number, (spec, dtype) in enumerate(served):
        page_size = (
            (1, 4, 16)[number % 3] if paged_subject.page_size == 4 else paged_subject.page_size
        )
        out = run_paged(paged_subject, lengths, spec, dtype, page_size, schedule)
        qkv = make_qkv(sum(lengths), spec, dtype)
        assert_near(out, expected_of(qkv, lengths, spec), TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [False, True])
def test_row_of_a_batch_equals_the_single_run(subject: Subject, causal: bool):
    spec = spec_of(4, 2, causal=causal)
    q, k, v = (x.to(subject.device) for x in make_qkv(sum(LENGTHS), spec, torch.bfloat16))
    batch = subject.ragged(LENGTHS).attend(q, k, v, spec).split(LENGTHS)
    for i, one in enumerate(zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True)):
        assert_near(subject.ragged((LENGTHS[i],)).attend(*one, spec), batch[i], 1e-2)


@pytest.mark.parametrize(
    "lengths", [(0,), (0, 0), (0, 5), (5, 0), (0, 5, 0, 0, 5, 7, 0), (3, 0, 3), (0, 0, 1)]
)
def test_empty_sequences(subject: Subject, lengths: tuple[int, ...]):
    spec = spec_of(4, 2)
    qkv = [x.to(subject.device) for x in make_qkv(sum(lengths), spec, torch.bfloat16)]
    out = subject.ragged(lengths).attend(*qkv, spec)
    assert out.shape == qkv[0].shape
    if sum(lengths):
        assert_near(out, expected_of(tuple(qkv), lengths, spec), 2e-2)
    if not subject.serves_pages(spec, subject.page_size):
        return
    pool = subject.pool(lengths, spec)
    batch = subject.backend.plan_paged(pool.layout(subject, lengths, lengths), pool.pages)
    paged = batch.attend(*qkv, spec)
    assert paged.shape == out.shape
    if sum(lengths):
        assert_near(paged, out, 1e-2)


def test_one_plan_serves_unlike_layers(subject: Subject):
    """Layers differ in window and cap; keys and values are views of a fused result."""
    kinds = [{"window": (2, None)}, {}, {"window": (2, None)}, {"soft_cap": 2.0}, {"causal": False}]
    kinds = [{}, {"causal": False}] if FEW else kinds
    specs = [spec_of(4, 2, layer=i, **kind) for i, kind in enumerate(kinds)]
    pool = subject.pool(LENGTHS, specs[0], layers=len(specs))
    ragged = subject.ragged(LENGTHS)
    paged = None
    if subject.serves_pages(specs[0], subject.page_size):
        layout = pool.layout(subject, LENGTHS, LENGTHS)
        paged = subject.backend.plan_paged(layout, pool.pages)
    for seed, spec in enumerate(specs):
        if not subject.serves(spec):
            continue
        qkv = torch.cat(make_qkv(sum(LENGTHS), spec, torch.bfloat16, seed), dim=1)
        q, k, v = qkv.to(subject.device).split([4, 2, 2], dim=1)
        expected = expected_of((q, k, v), LENGTHS, spec)
        assert_near(ragged.attend(q, k, v, spec), expected, 2e-2)
        if paged is not None:
            assert_near(paged.attend(q, k, v, spec), expected, 2e-2)


def test_batches_that_alternate(subject: Subject):
    """Plans of several batches are alive at once, more than there are wrappers of a kind."""
    spec = spec_of(4, 2)
    all_lengths = [(5, 3), (1, 9, 2), (12,), (4, 4)]
    batches = [subject.ragged(lengths) for lengths in all_lengths]
    for round_ in range(3):
        for lengths, batch in zip(all_lengths, batches, strict=True):
            qkv = make_qkv(sum(lengths), spec, torch.bfloat16, round_)
            out = batch.attend(*(x.to(subject.device) for x in qkv), spec)
            assert_near(out, expected_of(qkv, lengths, spec), 2e-2)


def test_writes_only_the_slots_of_the_batch(paged_subject: Subject):
    spec, lengths = spec_of(4, 2), (6, 3)
    pool = paged_subject.pool(lengths, spec)
    q, k, v = (x.to(paged_subject.device) for x in make_qkv(sum(lengths), spec, torch.bfloat16))
    layout = pool.layout(paged_subject, lengths, lengths)
    paged_subject.backend.plan_paged(layout, pool.pages).attend(q, k, v, spec)
    for pages, new in ((pool.pages.keys[0], k), (pool.pages.values[0], v)):
        slots = pages.flatten(0, 1)
        assert torch.equal(slots[layout.slot_mapping], new)
        assert int(slots.any(-1).any(-1).sum()) == sum(lengths)


def test_others_may_write_the_pages(paged_subject: Subject):
    spec, lengths = spec_of(4, 2), (6, 3)
    pool = paged_subject.pool(lengths, spec)
    q, k, v = (x.to(paged_subject.device) for x in make_qkv(sum(lengths), spec, torch.bfloat16))
    layout = pool.layout(paged_subject, lengths, lengths)
    batch = paged_subject.backend.plan_paged(layout, pool.pages)
    assert isinstance(batch, StoredAttention)
    for pages, new in zip(batch.keys_and_values(0), (k, v), strict=True):
        pages.flatten(0, 1)[batch.slots_T] = new
    stored = batch.attend_stored(q, spec)
    assert_near(stored, expected_of((q, k, v), lengths, spec), 2e-2)


class Captured:
    """A graph of one call on a GPU; on a CPU the call again, during which nothing may be planned."""

    def __init__(self, call: Callable[[], Tensor], device: torch.device) -> None:
        self.out = call()  # plans and compiles
        self._call, self._graph = call, None
        if device.type == "cuda":
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.out = call()

    def replay(self) -> Tensor:
        if self._graph is not None:
            self._graph.replay()
            return self.out.clone()
        with flashinfer_stand_in.capturing():
            return self._call()


def test_graph_of_ragged_batches(subject: Subject):
    """Batches of one bucket: real sequences, empty ones, and one that takes the padding."""
    assert subject.backend.graph_support is GraphSupport.ALL
    specs = [spec_of(4, 2), spec_of(4, 2, causal=False), spec_of(4, 2, window=(3, None))]
    specs = specs[:2] if FEW else specs
    batches = [(20, 7, 0, 37), (1, 0, 0, 63), (9, 30, 20, 5)]
    cu_seqlens = subject.cumulated(batches[0])
    fixed = subject.backend.fix_ragged(RaggedLayout(cu_seqlens, batches[0]), 64)
    inputs = [x.to(subject.device) for x in make_qkv(64, specs[0], torch.bfloat16)]
    graphs = [Captured(partial(fixed.attend, *inputs, spec), subject.device) for spec in specs]
    for seed, lengths in enumerate([*batches, batches[0]]):
        cu_seqlens.copy_(subject.cumulated(lengths))
        qkv = make_qkv(64, specs[0], torch.bfloat16, seed)
        for target, source in zip(inputs, qkv, strict=True):
            target.copy_(source)
        fixed.update(RaggedLayout(cu_seqlens, lengths))
        for spec, graph in zip(specs, graphs, strict=True):
            out = graph.replay()
            assert_near(out, expected_of(qkv, lengths, spec), 2e-2)
            assert torch.equal(out, fixed.attend(*inputs, spec))


def fix_decode(subject: Subject, layout: PagedLayout, pages: KVPages) -> FixedBatch:
    most = layout.block_table.shape[1] * pages.page_size
    return subject.backend.fix_paged(layout, pages, most)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (5, 1), (8, 1)])
def test_graph_of_decode_steps(paged_subject: Subject, heads: int, kv_heads: int):
    spec, lengths = spec_of(heads, kv_heads), (9, 30, 17)
    pool = paged_subject.pool(lengths, spec)
    qkv = make_qkv(sum(lengths), spec, torch.bfloat16)
    sequences = list(zip(*(x.split(lengths) for x in qkv), strict=True))
    expected = [attend_f64(*one, spec) for one in sequences]
    prompt = tuple(n - 4 for n in lengths)
    first = [
        torch.cat([one[i][:-4] for one in sequences]).to(paged_subject.device) for i in range(3)
    ]
    layout = pool.layout(paged_subject, prompt, prompt)
    paged_subject.backend.plan_paged(layout, pool.pages).attend(*first, spec)
    static: PagedLayout | None = None
    for step in range(4):
        rows = [n - 4 + step for n in lengths]
        new = [
            torch.cat([one[i][r : r + 1] for one, r in zip(sequences, rows, strict=True)])
            for i in range(3)
        ]
        layout = pool.layout(paged_subject, (1, 1, 1), tuple(r + 1 for r in rows))
        if static is None:
            static, inputs = layout, [x.to(paged_subject.device) for x in new]
            fixed = fix_decode(paged_subject, static, pool.pages)
            call = partial(fixed.attend, *inputs, spec)
            graph = Captured(call, paged_subject.device)
        static.slot_mapping.copy_(layout.slot_mapping)
        for target, source in zip(inputs, new, strict=True):
            target.copy_(source)
        now = PagedLayout(
            static.cu_seqlens_q,
            layout.query_lens,
            layout.kv_lens,
            static.block_table,
            static.slot_mapping,
        )
        fixed.update(now)
        wanted = torch.cat([one[r : r + 1] for one, r in zip(expected, rows, strict=True)])
        assert_near(graph.replay(), wanted, 2e-2)


def test_says_what_it_cannot_serve(subject: Subject):
    backend, device = subject.backend, subject.device

    def reasons(dtype: torch.dtype = torch.bfloat16, **facts: object) -> str:
        return "; ".join(backend.unsupported(spec_of(4, 2, **facts), dtype, device))

    assert reasons() == ""
    assert "dtype torch.float32" in reasons(torch.float32)
    assert "dtype torch.int8" in reasons(torch.int8)
    assert "5 query heads" in "; ".join(backend.unsupported(spec_of(5, 2), torch.bfloat16, device))
    assert "head size 20" in reasons(head_dim=20)
    assert "head size 512" in reasons(head_dim=512)
    assert "(-1, None)" in reasons(window=(-1, None))
    assert "soft cap 0.0" in reasons(soft_cap=0.0)
    assert "bias by position" in reasons(bias=SlopedBias(4))
    two_sided = reasons(causal=False, window=(4, 4))
    assert ("(4, 4)" in two_sided) == backend.name.startswith("flashinfer")
    assert ("soft cap 2.0" in reasons(soft_cap=2.0)) == backend.name.startswith("torch-flash")
    assert (reasons(head_dim=32) != "") == backend.name.startswith("flashinfer")


def test_pages_that_a_library_cannot_read():
    spec, cpu = spec_of(4, 2), torch.device("cpu")

    def reasons(name: str, page_size: int) -> list[str]:
        return STAND_INS[name]().unsupported_paged(spec, torch.bfloat16, cpu, page_size)

    assert reasons("flash-attn-2", 256) == []
    assert "16 tokens" in reasons("flash-attn-2", 16)[0]
    assert reasons("torch-flash", 256) != []
    for name in ("flash-attn-3", "flash-attn-4", "flashinfer-fa2", "flashinfer-fa3"):
        assert reasons(name, 16) == []


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_the_real_back_end_says_why_it_does_not_run_on_a_cpu(name: str):
    backend = BACKENDS.load(name)()
    reasons = backend.unsupported(spec_of(4, 2), torch.bfloat16, torch.device("cpu"))
    assert reasons == ["device cpu is not a CUDA device"]
