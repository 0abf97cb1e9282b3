"""Packs token ids into the batches that models take, for tests of any part."""

from collections.abc import Callable, Sequence

import torch

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import (
    AttentionBackend,
    AttentionSpec,
    KVPages,
    PagedLayout,
    RaggedLayout,
)
from rose.kernels.recurrence import RecurrentBatch, States, StoredRows
from rose.models.backbone import state_specs
from rose.models.batch import TokenBatch
from rose.runtime.state_pool import allocate_states

PAGE = 4


def reference_backend() -> AttentionBackend:
    """The back end that every other one is measured by."""
    return BACKENDS.load("torch_sdpa")()


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    """Where each sequence starts, and the total."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def ragged(
    sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None
) -> tuple[TokenBatch, torch.Tensor]:
    """Pack sequences, with their segment ids if given; returns the batch and cu_seqlens."""
    lengths = tuple(map(len, sequences))
    cu_seqlens = cumulative(lengths)
    plan = reference_backend().plan_ragged(RaggedLayout(cu_seqlens, lengths))
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    types = None if segments is None else torch.tensor([i for row in segments for i in row])
    positions = torch.cat([torch.arange(n) for n in lengths])
    recurrence = RecurrentBatch(lengths, cu_seqlens.device)
    return TokenBatch(ids, positions, plan, types, recurrence), cu_seqlens


def new_pages(specs: Sequence[AttentionSpec], count: int) -> KVPages:
    """A page pool for a model, full of NaN so that what is read too early shows."""
    shape = (count, PAGE, specs[0].num_kv_heads, specs[0].head_dim)
    keys, values = (tuple(torch.full(shape, torch.nan) for _ in specs) for _ in range(2))
    return KVPages(keys, values)


def new_states(model: object, count: int) -> States | None:
    """A state pool for a model, full of NaN; None for a model that needs none."""
    specs = state_specs(model)  # type: ignore[arg-type]
    if not specs:
        return None
    states = allocate_states(specs, count, torch.float32, torch.device("cpu"))
    for tensor in (*states.conv, *states.matrices):
        tensor.fill_(torch.nan)
    return states


def paged(
    pages: KVPages,
    chunks: Sequence[tuple[int, Sequence[int]]],
    first_pages: Sequence[int] | None = None,
    share: int | None = None,
    states: tuple[States, Sequence[int]] | None = None,
) -> TokenBatch:
    """Pack the next tokens of sequences: for each, how many are cached and the new ids.

    A sequence owns `share` pages from its entry of `first_pages` on; by default the pool is
    divided evenly. `states` are the pool of those and the sequences' rows in it.
    """
    share = share or (pages.num_pages - 1) // len(chunks)
    first_pages = first_pages or [1 + share * row for row in range(len(chunks))]
    table = torch.tensor([range(first, first + share) for first in first_pages], dtype=torch.int32)
    queries = tuple(len(ids) for _, ids in chunks)
    totals = tuple(cached + len(ids) for cached, ids in chunks)
    positions = [torch.arange(cached, cached + len(ids)) for cached, ids in chunks]
    slots = [
        table[row, position // PAGE].long() * PAGE + position % PAGE
        for row, position in enumerate(positions)
    ]
    layout = PagedLayout(cumulative(queries), queries, totals, table, torch.cat(slots))
    ids = torch.tensor([token for _, sequence in chunks for token in sequence])
    recurrence = None
    if states is not None:
        is_new = tuple(cached == 0 for cached, _ in chunks)
        stored = StoredRows(states[0], tuple(states[1]), is_new)
        recurrence = RecurrentBatch(queries, ids.device, stored)
    plan = reference_backend().plan_paged(layout, pages)
    return TokenBatch(ids, torch.cat(positions), plan, recurrence=recurrence)


def run_paged(
    model: Callable[[TokenBatch], torch.Tensor],
    sequences: Sequence[Sequence[int]],
    steps: Sequence[int],
) -> list[torch.Tensor]:
    """Run sequences chunk by chunk through a page pool; returns the states of each.

    In every step each unfinished sequence takes that many tokens; the last step size goes on.
    """
    specs = model.attention_specs  # type: ignore[attr-defined]
    share = -(-max(map(len, sequences)) // PAGE)
    pages = new_pages(specs, 1 + share * len(sequences))
    states = new_states(model, len(sequences))
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    sizes = iter(steps)
    size = next(sizes)
    while any(d < len(ids) for d, ids in zip(done, sequences, strict=True)):
        active = [i for i, ids in enumerate(sequences) if done[i] < len(ids)]
        chunks = [(done[i], sequences[i][done[i] : done[i] + size]) for i in active]
        rows = [1 + i for i in active]
        firsts = [1 + share * i for i in active]
        batch = paged(pages, chunks, firsts, share, None if states is None else (states, rows))
        parts = model(batch).split([len(ids) for _, ids in chunks])
        for i, part in zip(active, parts, strict=True):
            found[i].append(part)
            done[i] += len(part)
        size = next(sizes, size)
    return [torch.cat(parts) for parts in found]
