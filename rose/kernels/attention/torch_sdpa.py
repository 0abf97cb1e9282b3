"""Attention on torch alone: the back end that runs everywhere, and the reference for the others.

A plan sorts the batch's sequences into groups of like length (`grouping`); every layer then attends
once per group (`dense`). Sequences without cached tokens read keys and values straight from the
packed tensors; the others gather theirs from the pages.

Shape letters: T tokens of the batch, R rows of all groups with padding, H query heads, K key/value
heads, D head size, B sequences, N sequences of a group, L queries and M keys of each, P pages,
S slots of a page.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rose.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVPages,
    PagedLayout,
    RaggedLayout,
)
from rose.kernels.attention.dense import attend_capped, attend_dense, visibility_bias
from rose.kernels.attention.grouping import Group, group_sequences

Window = tuple[int | None, int | None]


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
        if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            reasons.append(f"dtype {dtype} is not float32, float64, bfloat16 or float16")
        if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
            reasons.append(
                f"{spec.num_heads} query heads do not divide among {spec.num_kv_heads} kv heads"
            )
        if any(side is not None and side < 0 for side in spec.window):
            reasons.append(f"window {spec.window} is negative")
        if spec.soft_cap is not None and spec.soft_cap <= 0:
            reasons.append(f"soft cap {spec.soft_cap} is not positive")
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
        device = layout.cu_seqlens.device
        self._groups = [
            _PlannedGroup(group, device)
            for group in group_sequences(layout.lengths, layout.lengths)
        ]
        self._rows = _Rows([group.facts for group in self._groups], layout.lengths, device)

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        q_RHD, k_RKD, v_RKD = (self._rows.take(x) for x in (q_THD, k_TKD, v_TKD))
        outputs = []
        start = 0
        for group in self._groups:
            end = start + group.rows
            outputs.append(group.attend(q_RHD[start:end], k_RKD[start:end], v_RKD[start:end], spec))
            start = end
        return self._rows.put(outputs, q_THD)


class _PagedBatch:
    """Keys and values are written to pages first; sequences with cached tokens read them there."""

    def __init__(self, layout: PagedLayout, pages: KVPages) -> None:
        device = layout.cu_seqlens_q.device
        groups = group_sequences(layout.query_lens, layout.kv_lens)
        self._fresh = [_PlannedGroup(group, device) for group in groups if group.is_fresh]
        self._cached = [
            _CachedGroup(group, layout.block_table, pages.page_size)
            for group in groups
            if not group.is_fresh
        ]
        self._fresh_rows = sum(group.rows for group in self._fresh)
        self._rows = _Rows(groups, layout.query_lens, device)
        self._slots_T = layout.slot_mapping
        self._pages = pages

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self._write(k_TKD, v_TKD, spec.layer)
        q_RHD = self._rows.take(q_THD)
        outputs = []
        start = 0
        if self._fresh:
            k_RKD, v_RKD = (self._rows.take(x, self._fresh_rows) for x in (k_TKD, v_TKD))
        for group in self._fresh:
            end = start + group.rows
            outputs.append(group.attend(q_RHD[start:end], k_RKD[start:end], v_RKD[start:end], spec))
            start = end
        for cached in self._cached:
            end = start + cached.rows
            outputs.append(cached.attend(q_RHD[start:end], keys, values, spec))
            start = end
        return self._rows.put(outputs, q_THD)

    def _write(self, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Put the new tokens' keys and values into their slots; return all slots, [P * S, K, D]."""
        keys = self._pages.keys[layer].flatten(0, 1)
        values = self._pages.values[layer].flatten(0, 1)
        keys.index_copy_(0, self._slots_T, k_TKD)
        values.index_copy_(0, self._slots_T, v_TKD)
        return keys, values


class _PlannedGroup:
    """A group of sequences that have no cached tokens."""

    def __init__(self, facts: Group, device: torch.device) -> None:
        self.facts = facts
        self.rows = len(facts.members) * facts.shape[0]
        self._device = device
        self._biases: dict[tuple[bool, Window, torch.dtype], Tensor] = {}

    def attend(self, q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend with the group's rows of the packed tensors; returns [R, H, D]."""
        size = (len(self.facts.members), self.facts.shape[0])
        q_NLHD, k_NLKD, v_NLKD = (x.unflatten(0, size) for x in (q_RHD, k_RKD, v_RKD))
        return self._attend(q_NLHD, k_NLKD, v_NLKD, spec).flatten(0, 1)

    def _attend(
        self, q_NLHD: Tensor, k_NLKD: Tensor, v_NLKD: Tensor, spec: AttentionSpec
    ) -> Tensor:
        # Padding lies behind the real tokens, where no causal query looks.
        open_window = _window_is_open(spec, self.facts.shape[1])
        if spec.soft_cap is not None:
            bias = self._bias(spec, q_NLHD.dtype)
            return attend_capped(
                q_NLHD, k_NLKD, v_NLKD, scale=spec.scale, soft_cap=spec.soft_cap, bias=bias
            )
        if open_window and (spec.causal or self.facts.is_uniform):
            return attend_dense(q_NLHD, k_NLKD, v_NLKD, scale=spec.scale, causal=spec.causal)
        bias = self._bias(spec, q_NLHD.dtype)
        return attend_dense(q_NLHD, k_NLKD, v_NLKD, scale=spec.scale, bias=bias)

    def _bias(self, spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
        key = (spec.causal, spec.window, dtype)
        if key not in self._biases:
            self._biases[key] = visibility_bias(
                self.facts.query_lens,
                self.facts.kv_lens,
                (0,) * len(self.facts.members),
                self.facts.shape,
                causal=spec.causal,
                window=spec.window,
                dtype=dtype,
                device=self._device,
            )
        return self._biases[key]


class _CachedGroup:
    """A group of sequences with cached tokens and equally many new ones."""

    def __init__(self, facts: Group, block_table: Tensor, page_size: int) -> None:
        self.facts = facts
        self.rows = len(facts.members) * facts.shape[0]
        self._device = block_table.device
        members = torch.tensor(facts.members, device=self._device)
        self._block_table = block_table.index_select(0, members).long()
        self._page_size = page_size
        self._views: dict[tuple[bool, Window, torch.dtype], tuple[Tensor, Tensor | None]] = {}

    def attend(self, q_RHD: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend with the group's rows of the queries over the pages' slots; returns [R, H, D]."""
        slots, bias = self._view(spec, q_RHD.dtype)
        count = len(self.facts.members)
        q_NLHD = q_RHD.unflatten(0, (count, self.facts.shape[0]))
        k_NMKD = keys.index_select(0, slots).unflatten(0, (count, -1))
        v_NMKD = values.index_select(0, slots).unflatten(0, (count, -1))
        if spec.soft_cap is None:
            out_NLHD = attend_dense(q_NLHD, k_NMKD, v_NMKD, scale=spec.scale, bias=bias)
        else:
            out_NLHD = attend_capped(
                q_NLHD, k_NMKD, v_NMKD, scale=spec.scale, soft_cap=spec.soft_cap, bias=bias
            )
        return out_NLHD.flatten(0, 1)

    def _view(self, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The slots that layers of this kind read, [N * M], and the bias over them."""
        key = (spec.causal, spec.window, dtype)
        if key not in self._views:
            self._views[key] = self._make_view(spec, dtype)
        return self._views[key]

    def _make_view(self, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        first_keys = tuple(self._first_key(kv, spec.window[0]) for kv in self.facts.kv_lens)
        counts = [kv - first for kv, first in zip(self.facts.kv_lens, first_keys, strict=True)]
        shape = (self.facts.shape[0], max(counts))
        slots = self._slots(first_keys, shape[1])
        if shape[0] == 1 and len(set(counts)) == 1:  # every key that is present is visible
            return slots, None
        bias = visibility_bias(
            self.facts.query_lens,
            self.facts.kv_lens,
            first_keys,
            shape,
            causal=spec.causal,
            window=spec.window,
            dtype=dtype,
            device=self._device,
        )
        return slots, bias

    def _first_key(self, kv_len: int, left: int | None) -> int:
        """Position of the first key that any of a sequence's queries sees."""
        return 0 if left is None else max(0, kv_len - self.facts.shape[0] - left)

    def _slots(self, first_keys: tuple[int, ...], count: int) -> Tensor:
        # Padding repeats a sequence's last key: slots never written may hold NaN, which no bias hides.
        facts = torch.tensor([first_keys, self.facts.kv_lens], device=self._device).unsqueeze(-1)
        position_NM = torch.minimum(
            facts[0] + torch.arange(count, device=self._device), facts[1] - 1
        )
        page_NM = self._block_table.gather(1, position_NM // self._page_size)
        return (page_NM * self._page_size + position_NM % self._page_size).flatten()


class _Rows:
    """Moves packed tokens into the groups' order and back, where the two differ."""

    def __init__(
        self, groups: Sequence[Group], lengths: Sequence[int], device: torch.device
    ) -> None:
        starts = [0, *accumulate(lengths)]
        self._gather: Tensor | None = None
        self._scatter: Tensor | None = None
        order = [i for group in groups for i in group.members]
        padded = any(len(set(group.query_lens)) > 1 for group in groups)
        if padded or any(a > b for a, b in pairwise(order)):
            gather, scatter = _row_order(groups, starts)
            self._gather = gather.to(device, non_blocking=True)
            self._scatter = scatter.to(device, non_blocking=True)

    def take(self, x_TKD: Tensor, count: int | None = None) -> Tensor:
        """Return the groups' rows, padding included: all, or the first `count`."""
        if self._gather is None:
            return x_TKD
        return x_TKD.index_select(0, self._gather[:count])

    def put(self, outputs: list[Tensor], like_THD: Tensor) -> Tensor:
        """Join the groups' outputs and bring them into the order of the packed tokens."""
        if not outputs:
            return like_THD.new_zeros(like_THD.shape)
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if self._scatter is None else joined.index_select(0, self._scatter)


def _row_order(groups: Sequence[Group], starts: list[int]) -> tuple[Tensor, Tensor]:
    """Token of every row of the groups, [R], and row of every token, [T].

    Padding rows repeat their sequence's last token, so they bring no foreign value into a group.
    """
    gather: list[Tensor] = []
    scatter = torch.empty(starts[-1], dtype=torch.int64)
    row = 0
    for group in groups:
        length = group.shape[0]
        first_N1 = torch.tensor([starts[i] for i in group.members]).unsqueeze(1)
        count_N1 = torch.tensor(group.query_lens).unsqueeze(1)
        offset_L = torch.arange(length)
        token_NL = first_N1 + torch.minimum(offset_L, count_N1 - 1)
        row_NL = torch.arange(row, row + token_NL.numel()).view(token_NL.shape)
        real_NL = offset_L < count_N1
        scatter[token_NL[real_NL]] = row_NL[real_NL]
        gather.append(token_NL.flatten())
        row += token_NL.numel()
    return torch.cat(gather), scatter


def _window_is_open(spec: AttentionSpec, length: int) -> bool:
    """Whether a layer's window hides nothing in sequences of at most `length` tokens."""
    left, right = spec.window
    left_open = left is None or left >= length - 1
    return left_open and (spec.causal or right is None or right >= length - 1)
