"""Times of the attention back ends for a model's layers, for the table that "auto" reads.

Only attention is run, on random queries, keys and values, so no weights are needed beside the
layers' facts. Shape letters: T tokens, H query heads, K key/value heads, D head size.
"""

import time
from collections.abc import Callable, Iterable, Sequence

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
from rose.kernels.attention.table import Shape, shape_of

Lengths = tuple[int, ...]
PROMPTS: tuple[Lengths, ...] = ((512,) * 8, (128,) * 32)  # texts of the ragged batches
STREAMS, CACHED = 16, 1024  # sequences of a decode step, and the tokens of each
RUNS, SHARE = 7, 16  # a CPU gets batches of a sixteenth of the size

Times = dict[str, float]


def measure(
    specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, page_size: int
) -> dict[Shape, Times]:
    """Time every back end that can serve them, for each shape of the layers.

    Args:
        specs: the model's layers.
        dtype: of queries, keys and values.
        device: where they are.
        page_size: tokens of a KV page.

    Returns:
        Milliseconds of one layer, by shape and back end: the sum over the batches of texts, and,
        where the layers are causal, those of a decode step over pages.
    """
    found: dict[Shape, Times] = {}
    for spec in _distinct(specs):
        found[shape_of(spec, device, paged=False)] = _time_ragged(spec, dtype, device)
        if spec.causal:
            times = _time_paged(spec, dtype, device, page_size)
            found[shape_of(spec, device, paged=True)] = times
    return found


def _distinct(specs: Sequence[AttentionSpec]) -> Iterable[AttentionSpec]:
    """The first layer of each shape."""
    by_shape: dict[tuple[object, ...], AttentionSpec] = {}
    for spec in specs:
        key = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.causal)
        by_shape.setdefault(key, spec)
    return by_shape.values()


def _time_ragged(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> Times:
    times = {}
    for backend in _serving(lambda b: b.unsupported(spec, dtype, device)):
        backend.prepare([spec], dtype, paged=False)
        total = 0.0
        for texts in PROMPTS:
            lengths = texts[: max(1, len(texts) // _share(device))]
            ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
            batch = backend.plan_ragged(RaggedLayout(ends, lengths))
            total += _milliseconds(batch, spec, sum(lengths), dtype, device)
        times[backend.name] = total
    return times


def _time_paged(
    spec: AttentionSpec, dtype: torch.dtype, device: torch.device, page_size: int
) -> Times:
    times = {}
    streams = max(1, STREAMS // _share(device))
    layout, pages = _decode_step(spec, dtype, device, page_size, streams)
    for backend in _serving(lambda b: b.unsupported_paged(spec, dtype, device, page_size)):
        backend.prepare([spec], dtype, paged=True)
        batch = backend.plan_paged(layout, pages)
        times[backend.name] = _milliseconds(batch, spec, streams, dtype, device)
    return times


def _decode_step(
    spec: AttentionSpec, dtype: torch.dtype, device: torch.device, page_size: int, streams: int
) -> tuple[PagedLayout, KVPages]:
    """A step of one new token for each of `streams` sequences."""
    per_sequence = -(-CACHED // page_size)
    table = 1 + torch.arange(streams * per_sequence, dtype=torch.int32).view(streams, -1)
    slots = table[:, -1].long() * page_size + (CACHED - 1) % page_size
    shape = (1 + streams * per_sequence, page_size, spec.num_kv_heads, spec.head_dim)
    one = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.layer + 1))
    layout = PagedLayout(
        cu_seqlens_q=torch.arange(streams + 1, dtype=torch.int32, device=device),
        query_lens=(1,) * streams,
        kv_lens=(CACHED,) * streams,
        block_table=table.to(device),
        slot_mapping=slots.to(device),
    )
    return layout, KVPages(one, one)


def _serving(reasons: Callable[[AttentionBackend], list[str]]) -> Iterable[AttentionBackend]:
    for name in BACKENDS:
        backend = BACKENDS.load(name)()
        if not reasons(backend):
            yield backend


def _milliseconds(
    batch: AttentionBatch,
    spec: AttentionSpec,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Return the fastest of some runs, device work included."""
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)

    def rand(count: int) -> Tensor:
        return torch.randn(tokens, count, spec.head_dim, device=device, dtype=dtype)

    q_THD, k_TKD, v_TKD = map(rand, heads)
    times = []
    for _ in range(RUNS):
        _wait(device)
        began = time.perf_counter()
        batch.attend(q_THD, k_TKD, v_TKD, spec)
        _wait(device)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _share(device: torch.device) -> int:
    return SHARE if device.type == "cpu" else 1
