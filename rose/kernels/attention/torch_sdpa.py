"""Attention on torch alone: the back end that runs everywhere, and the reference for the others.

A plan sorts the batch's sequences into groups (`grouping`); every layer then attends once per group
(`dense`). Sequences without cached tokens read keys and values straight from the packed tensors;
the others read theirs from the pages.

Shape letters: T tokens of the batch, H query heads, K key/value heads, D head size, N sequences of
a group, L queries and M keys of each, R = N * L rows, P pages, S slots of a page.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rose.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVPages,
    PagedLayout,
    PositionBias,
    RaggedLayout,
)
from rose.kernels.attention.dense import (
    SCORE_ELEMENTS,
    attend_dense,
    attend_windowed,
    band_bias,
    ragged_bias,
)
from rose.kernels.attention.grouping import Group, group_sequences

# Up to this length, sequences are copied into padded groups to save kernel calls. On a CPU a call
# costs about as much as copying 32 tokens; an accelerator wants few launches.
SHORT_ON_CPU, SHORT_ELSEWHERE = 32, 512

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# What a layer's bias depends on: its window, clipped to the group's length, its bias by position,
# and the dtype.
_BiasKey = tuple[tuple[int, int], PositionBias | None, torch.dtype]


class TorchSdpaBackend(AttentionBackend):
    """Attention by torch's scaled_dot_product_attention, on any device."""

    name = "torch_sdpa"

    def unsupported(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """Say why a layer cannot be served; an empty list means that it can."""
        reasons = []
        if device.type == "meta":
            reasons.append("the meta device computes nothing")
        if dtype not in DTYPES:
            reasons.append(f"dtype {dtype} is none of {', '.join(map(str, DTYPES))}")
        if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
            reasons.append(
                f"{spec.num_heads} query heads do not divide among {spec.num_kv_heads} kv heads"
            )
        if any(side is not None and side < 0 for side in spec.window):
            reasons.append(f"window {spec.window} has a negative side")
        if spec.soft_cap is not None and spec.soft_cap <= 0:
            reasons.append(f"soft cap {spec.soft_cap} is not positive")
        if spec.soft_cap is not None and spec.bias is not None:
            reasons.append("a soft cap together with a bias by position")
        return reasons

    def plan_ragged(self, layout: RaggedLayout) -> AttentionBatch:
        """Plan a batch without a KV cache."""
        return _RaggedBatch(layout)

    def plan_paged(self, layout: PagedLayout, pages: KVPages) -> AttentionBatch:
        """Plan a batch whose keys and values are read from and written to `pages`."""
        return _PagedBatch(layout, pages)


class _RaggedBatch:
    """Keys and values are those of this forward pass."""

    def __init__(self, layout: RaggedLayout) -> None:
        device, lengths = layout.cu_seqlens.device, layout.lengths
        starts = [0, *accumulate(lengths)]
        groups = group_sequences(lengths, lengths, short=_short(device))
        self._groups = [_FreshGroup(group, starts, device) for group in groups]

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        return _join([(g.rows, g.attend(q_THD, k_TKD, v_TKD, spec)) for g in self._groups], q_THD)


class _PagedBatch:
    """Keys and values are written to pages first; sequences with cached tokens read them there."""

    def __init__(self, layout: PagedLayout, pages: KVPages) -> None:
        device = layout.block_table.device
        starts = [0, *accumulate(layout.query_lens)]
        groups = group_sequences(layout.query_lens, layout.kv_lens, short=_short(device))
        self._fresh = [_FreshGroup(g, starts, device) for g in groups if g.is_fresh]
        self._cached = [
            _CachedGroup(g, starts, layout.block_table, pages.page_size)
            for g in groups
            if not g.is_fresh
        ]
        self._slots_T = layout.slot_mapping
        self._pages = pages

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self._write(k_TKD, v_TKD, spec.layer)
        parts = [(g.rows, g.attend(q_THD, k_TKD, v_TKD, spec)) for g in self._fresh]
        parts += [(g.rows, g.attend(q_THD, keys, values, spec)) for g in self._cached]
        return _join(parts, q_THD)

    def _write(self, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Put the new tokens' keys and values into their slots; return all slots, [P * S, K, D]."""
        keys = self._pages.keys[layer].view(-1, *k_TKD.shape[1:])
        values = self._pages.values[layer].view(-1, *v_TKD.shape[1:])
        return keys.index_copy_(0, self._slots_T, k_TKD), values.index_copy_(
            0, self._slots_T, v_TKD
        )


class _Rows:
    """Which packed tokens a group attends with: a slice where possible, else copies."""

    def __init__(self, group: Group, starts: Sequence[int], device: torch.device) -> None:
        length = group.shape[0]
        self._size = (len(group.members), length)
        self.start = starts[group.members[0]]
        tokens = sum(group.query_lens)
        self.is_slice = (
            self._size[0] * length == tokens == starts[group.members[-1]] + length - self.start
        )
        self.end = self.start + tokens
        self._gather_R: Tensor | None = None  # token of each row
        self._token: Tensor | None = None  # token of each row but the padding
        self._real: Tensor | None = None  # rows but the padding, where there is any
        if not self.is_slice:
            self._plan_copies(group, starts, device)

    def _plan_copies(self, group: Group, starts: Sequence[int], device: torch.device) -> None:
        # Padding repeats a sequence's last token, so it brings no foreign value into the group.
        first_N1 = torch.tensor([starts[i] for i in group.members]).unsqueeze(1)
        count_N1 = torch.tensor(group.query_lens).unsqueeze(1)
        offset_L = torch.arange(group.shape[0])
        token_NL = first_N1 + torch.minimum(offset_L, count_N1 - 1)
        real_NL = offset_L < count_N1
        self._gather_R = token_NL.flatten().to(device, non_blocking=True)
        self._token = token_NL[real_NL].to(device, non_blocking=True)
        if len(set(group.query_lens)) > 1:
            self._real = real_NL.flatten().nonzero().squeeze(1).to(device, non_blocking=True)

    def take(self, x_THD: Tensor) -> Tensor:
        """Return the group's tokens, [N, L, H, D]."""
        if self._gather_R is None:
            return x_THD[self.start : self.end].unflatten(0, self._size)
        return x_THD.index_select(0, self._gather_R).unflatten(0, self._size)

    def put(self, x_NLHD: Tensor, out_THD: Tensor) -> None:
        """Write the group's results to their places."""
        x_RHD = x_NLHD.flatten(0, 1)
        if self._token is None:
            out_THD[self.start : self.end] = x_RHD
            return
        real = x_RHD if self._real is None else x_RHD.index_select(0, self._real)
        out_THD.index_copy_(0, self._token, real)


def _join(parts: list[tuple[_Rows, Tensor]], like_THD: Tensor) -> Tensor:
    """Bring the groups' results, [N, L, H, D] each, into the order of the packed tokens."""
    if len(parts) == 1:
        rows, out_NLHD = parts[0]
        if rows.is_slice and rows.end - rows.start == like_THD.shape[0]:
            return out_NLHD.flatten(0, 1)
    out_THD = like_THD.new_empty(like_THD.shape)
    for rows, out_NLHD in parts:
        rows.put(out_NLHD, out_THD)
    return out_THD


class _FreshGroup:
    """A group of sequences that have no cached tokens."""

    def __init__(self, facts: Group, starts: Sequence[int], device: torch.device) -> None:
        self.rows = _Rows(facts, starts, device)
        self._facts = facts
        self._uniform = facts.is_uniform
        self._length = facts.shape[1]
        # Whose bias by distance serves all: of equally long ones that of the first.
        self._alike = Group((0,), (self._length,), (self._length,)) if self._uniform else facts
        self._device = device
        self._biases: dict[_BiasKey, Tensor] = {}

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend with the group's rows of the packed tensors; returns [N, L, H, D]."""
        q, k, v = self.rows.take(q_THD), self.rows.take(k_TKD), self.rows.take(v_TKD)
        scale, soft_cap = spec.scale, spec.soft_cap
        window = _clip(spec, self._length)
        most = self._length - 1
        if spec.bias is None and window == (most, most) and self._uniform:
            return attend_dense(q, k, v, scale=scale, soft_cap=soft_cap)
        if spec.bias is None and window == (most, 0) and soft_cap is None:
            # Padding lies behind the real tokens, where no causal query looks.
            return attend_dense(q, k, v, scale=scale, causal=True)
        if spec.bias is not None and self._row_scores(spec) * q.shape[1] > SCORE_ELEMENTS:
            return self._attend_in_blocks(q, k, v, spec, window)
        bias = self._bias((window, spec.bias, q.dtype))
        if self._uniform and spec.bias is None:
            return attend_windowed(q, k, v, bias, window, scale=scale, soft_cap=soft_cap)
        return attend_dense(q, k, v, scale=scale, soft_cap=soft_cap, bias=bias)

    def _row_scores(self, spec: AttentionSpec) -> int:
        """Count the scores of the queries in one row of the group."""
        return len(self._facts.members) * spec.num_heads * self._length

    def _attend_in_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, window: tuple[int, int]
    ) -> Tensor:
        """Attend block of queries by block, each with a bias of its own.

        No layer keeps the bias for the next: of long texts it would be larger than the model.
        """
        assert spec.soft_cap is None, "a soft cap together with a bias by position"
        count = max(1, SCORE_ELEMENTS // self._row_scores(spec))
        parts = []
        for start in range(0, q.shape[1], count):
            rows = range(start, min(start + count, q.shape[1]))
            bias = ragged_bias(self._alike, None, window, q.dtype, self._device, spec.bias, rows)
            q_block = q[:, rows.start : rows.stop]
            parts.append(attend_dense(q_block, k, v, scale=spec.scale, bias=bias))
        return torch.cat(parts, dim=1)

    def _bias(self, key: _BiasKey) -> Tensor:
        if key not in self._biases:
            self._biases[key] = self._make_bias(*key)
        return self._biases[key]

    def _make_bias(
        self, window: tuple[int, int], position_bias: PositionBias | None, dtype: torch.dtype
    ) -> Tensor:
        if self._uniform and position_bias is None:
            return band_bias(self._length, window, dtype, self._device)
        return ragged_bias(self._alike, None, window, dtype, self._device, position_bias)


class _CachedGroup:
    """A group of sequences with cached tokens and equally many new ones."""

    def __init__(
        self, facts: Group, starts: Sequence[int], block_table: Tensor, page_size: int
    ) -> None:
        self._device = block_table.device
        self.rows = _Rows(facts, starts, self._device)
        self._facts = facts
        members = torch.tensor(facts.members, device=self._device)
        self._block_table = block_table.index_select(0, members).long()
        self._page_size = page_size
        self._reads: dict[_BiasKey, tuple[_Slots, Tensor | None]] = {}

    def attend(self, q_THD: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend with the group's queries over the pages' slots; returns [N, L, H, D]."""
        q_NLHD = self.rows.take(q_THD)
        key = (_clip(spec, self._facts.shape[1]), spec.bias, q_NLHD.dtype)
        if key not in self._reads:
            self._reads[key] = self._plan_read(*key)
        slots, bias = self._reads[key]
        k_NMKD, v_NMKD = slots.take(keys, values)
        return attend_dense(
            q_NLHD, k_NMKD, v_NMKD, scale=spec.scale, soft_cap=spec.soft_cap, bias=bias
        )

    def _plan_read(
        self, window: tuple[int, int], position_bias: PositionBias | None, dtype: torch.dtype
    ) -> "tuple[_Slots, Tensor | None]":
        """The slots that layers with this window and bias read, and the bias over them."""
        facts = self._facts
        queries = facts.shape[0]
        first_keys = tuple(max(0, kv - queries - window[0]) for kv in facts.kv_lens)
        counts = [kv - first for kv, first in zip(facts.kv_lens, first_keys, strict=True)]
        slots = _Slots(self._slots(first_keys, max(counts)), len(counts))
        all_visible = queries == 1 or (window[0] >= facts.shape[1] - 1 <= window[1])
        if position_bias is None and all_visible and len(set(counts)) == 1:
            return slots, None
        bias = ragged_bias(facts, first_keys, window, dtype, self._device, position_bias)
        return slots, bias

    def _slots(self, first_keys: tuple[int, ...], count: int) -> Tensor:
        # Padding repeats a sequence's last key: a slot never written may hold NaN, and no bias
        # hides that.
        facts = torch.tensor([first_keys, self._facts.kv_lens], device=self._device).unsqueeze(-1)
        offset_M = torch.arange(count, device=self._device)
        position_NM = torch.minimum(facts[0] + offset_M, facts[1] - 1)
        page_NM = self._block_table.gather(1, position_NM // self._page_size)
        return (page_NM * self._page_size + position_NM % self._page_size).flatten()


class _Slots:
    """Reads a group's keys and values, a view where they lie side by side in one sequence."""

    def __init__(self, slots: Tensor, count: int) -> None:
        self._slots = slots
        self._size = (count, slots.shape[0] // count)
        self._slice: slice | None = None
        if count == 1 and not slots.is_cuda and bool((slots.diff() == 1).all()):
            self._slice = slice(int(slots[0]), int(slots[-1]) + 1)
        # Reused by all layers: fresh memory of this size costs more than the copy into it.
        self._buffers: tuple[Tensor, Tensor] | None = None

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N, M, K, D] of both; valid until the next call."""
        if self._slice is not None:
            return keys[self._slice].unsqueeze(0), values[self._slice].unsqueeze(0)
        if self._buffers is None or self._buffers[0].shape[1:] != keys.shape[1:]:
            shape = (self._slots.shape[0], *keys.shape[1:])
            self._buffers = (keys.new_empty(shape), values.new_empty(shape))
        k_RKD, v_RKD = self._buffers
        torch.index_select(keys, 0, self._slots, out=k_RKD)
        torch.index_select(values, 0, self._slots, out=v_RKD)
        return k_RKD.unflatten(0, self._size), v_RKD.unflatten(0, self._size)


def _clip(spec: AttentionSpec, length: int) -> tuple[int, int]:
    """The window of a layer in sequences of at most `length` tokens, without None."""
    left, right = spec.window
    most = length - 1
    left = most if left is None else min(left, most)
    if spec.causal:
        return left, 0
    return left, most if right is None else min(right, most)


def _short(device: torch.device) -> int:
    return SHORT_ON_CPU if device.type == "cpu" else SHORT_ELSEWHERE
