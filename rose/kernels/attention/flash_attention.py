"""Attention by FlashAttention: flash-attn-2, flash-attn-3, flash-attn-4, and torch's own copy of 2.

All are functions of packed tensors and cumulated lengths on the device; nothing is planned but a
few index tensors. They know windows to both sides and any head size that 8 divides.

Shape letters: T tokens, H query heads, K key/value heads, D head size, B sequences, P pages,
S slots of a page.
"""

from abc import abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

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
from rose.kernels.attention.gpu import device_reasons, layer_reasons, load_library
from rose.kernels.attention.stored import StoredAttention

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where queries and keys of each sequence lie, on the device, and bounds on the host.

    `cu_seqlens_q` and `cu_seqlens_k` are int32 [B + 1], `kv_lens` int32 [B] where keys lie in
    pages. The bounds are baked into a graph.
    """

    cu_seqlens_q: Tensor
    max_q: int
    max_k: int
    cu_seqlens_k: Tensor
    kv_lens: Tensor | None = None
    block_table: Tensor | None = None  # int32 [B, pages of the longest]


class FlashAttentionBackend(AttentionBackend):
    """What all versions share."""

    module: ClassVar[str]
    function: ClassVar[str] = "flash_attn_varlen_func"
    capabilities: ClassVar[tuple[tuple[int, int], tuple[int, int] | None]]
    unlimited: ClassVar[int | None] = -1  # how a window without a bound is written
    graph_support = GraphSupport.ALL

    def unsupported(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """Say why a layer cannot be served; an empty list means that it can."""
        reasons = [*self.device_reasons(device), *layer_reasons(spec, dtype)]
        if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
            reasons.append(f"head size {spec.head_dim} is no multiple of 8 up to {MAX_HEAD_DIM}")
        if not reasons and isinstance(library := self.library(), str):
            reasons.append(library)
        return reasons

    def device_reasons(self, device: torch.device) -> list[str]:
        """Say why the kernels do not run on a device."""
        return device_reasons(device, *self.capabilities)

    def library(self) -> ModuleType | str:
        """Return the library, or why it cannot be used."""
        return load_library(self.module, self.function)

    @abstractmethod
    def run_ragged(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Attend with keys and values that lie beside the queries; returns [T, H, D]."""

    @abstractmethod
    def run_paged(
        self, q_THD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Attend with keys and values in pages; returns [T, H, D]."""

    def plan_ragged(self, layout: RaggedLayout) -> AttentionBatch:
        """Plan a batch without a KV cache."""
        return _RaggedBatch(self, layout, layout.max_seqlen)

    def plan_paged(self, layout: PagedLayout, pages: KVPages) -> AttentionBatch:
        """Plan a batch whose keys and values are read from and written to `pages`."""
        return _PagedBatch(self, layout, pages, layout.max_kv_len)

    def fix_ragged(self, layout: RaggedLayout, max_seqlen: int) -> FixedBatch:
        """Plan batches of one size for a graph."""
        assert layout.max_seqlen <= max_seqlen
        return _RaggedBatch(self, layout, max_seqlen)

    def fix_paged(self, layout: PagedLayout, pages: KVPages, max_kv_len: int) -> FixedBatch:
        """Plan steps of one size for a graph."""
        assert layout.max_kv_len <= max_kv_len <= layout.block_table.shape[1] * pages.page_size
        return _PagedBatch(self, layout, pages, max_kv_len)

    def window(self, spec: AttentionSpec) -> tuple[int | None, int | None]:
        """Return a layer's window as the library writes it; a causal layer sees nothing right."""
        left, right = (self.unlimited if side is None else side for side in spec.window)
        return left, 0 if spec.causal else right


class FlashAttention2Backend(FlashAttentionBackend):
    """Version 2, for compute capability 8.0 and above; pages of a multiple of 256 tokens."""

    name = "flash-attn-2"
    module = "flash_attn"
    capabilities = ((8, 0), None)

    def unsupported_paged(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, page_size: int
    ) -> list[str]:
        """Say why a layer whose keys and values lie in pages cannot be served."""
        reasons = self.unsupported(spec, dtype, device)
        if page_size % 256:
            reasons.append(f"pages of {page_size} tokens: only multiples of 256 are possible")
        return reasons

    def run_ragged(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Attend with keys and values that lie beside the queries; returns [T, H, D]."""
        return self._run(q_THD, k_TKD, v_TKD, lengths, spec)

    def run_paged(
        self, q_THD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Attend with keys and values in pages; returns [T, H, D]."""
        return self._run(q_THD, k_PSKD, v_PSKD, lengths, spec, block_table=lengths.block_table)

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Lengths,
        spec: AttentionSpec,
        **more: Tensor | None,
    ) -> Tensor:
        library = self.library()
        assert not isinstance(library, str), library
        return _first(
            library.flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=lengths.cu_seqlens_q,
                cu_seqlens_k=lengths.cu_seqlens_k,
                max_seqlen_q=lengths.max_q,
                max_seqlen_k=lengths.max_k,
                softmax_scale=spec.scale,
                causal=spec.causal,
                window_size=self.window(spec),
                softcap=spec.soft_cap or 0.0,
                **more,
            )
        )


class FlashAttention3Backend(FlashAttentionBackend):
    """Version 3, for Hopper alone; pages of any size."""

    name = "flash-attn-3"
    module = "flash_attn_interface"
    capabilities = ((9, 0), (9, 0))

    def run_ragged(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Attend with keys and values that lie beside the queries; returns [T, H, D]."""
        library = self.library()
        assert not isinstance(library, str), library
        return _first(
            library.flash_attn_varlen_func(
                q_THD,
                k_TKD,
                v_TKD,
                cu_seqlens_q=lengths.cu_seqlens_q,
                cu_seqlens_k=lengths.cu_seqlens_k,
                max_seqlen_q=lengths.max_q,
                max_seqlen_k=lengths.max_k,
                **self._facts(spec),
            )
        )

    def run_paged(
        self, q_THD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Attend with keys and values in pages; returns [T, H, D]."""
        library = self.library()
        assert not isinstance(library, str), library
        return _first(
            library.flash_attn_with_kvcache(
                q_THD,
                k_PSKD,
                v_PSKD,
                cache_seqlens=lengths.kv_lens,
                page_table=lengths.block_table,
                cu_seqlens_q=lengths.cu_seqlens_q,
                max_seqlen_q=lengths.max_q,
                **self._facts(spec),
            )
        )

    def _facts(self, spec: AttentionSpec) -> dict[str, Any]:
        return {
            "softmax_scale": spec.scale,
            "causal": spec.causal,
            "window_size": self.window(spec),
            "softcap": spec.soft_cap or 0.0,
        }


class FlashAttention4Backend(FlashAttentionBackend):
    """Version 4, in CuTe, for compute capability 9.0 and above; pages of any size.

    It loads values past a sequence's end and weighs them with 0, so a NaN there spreads.
    """

    name = "flash-attn-4"
    module = "flash_attn.cute"
    capabilities = ((9, 0), None)
    unlimited = None

    def run_ragged(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Attend with keys and values that lie beside the queries; returns [T, H, D]."""
        places: dict[str, Tensor | None] = {"cu_seqlens_k": lengths.cu_seqlens_k}
        return self._run(q_THD, k_TKD, v_TKD, lengths, spec, places)

    def run_paged(
        self, q_THD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Attend with keys and values in pages; returns [T, H, D]."""
        places = {"seqused_k": lengths.kv_lens, "page_table": lengths.block_table}
        return self._run(q_THD, k_PSKD, v_PSKD, lengths, spec, places)

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Lengths,
        spec: AttentionSpec,
        places: dict[str, Tensor | None],
    ) -> Tensor:
        library = self.library()
        assert not isinstance(library, str), library
        return _first(
            library.flash_attn_varlen_func(
                q=q,
                k=k,
                v=v,
                cu_seqlens_q=lengths.cu_seqlens_q,
                max_seqlen_q=lengths.max_q,
                max_seqlen_k=lengths.max_k,
                softmax_scale=spec.scale,
                causal=spec.causal,
                window_size=self.window(spec),
                softcap=spec.soft_cap or 0.0,
                **places,
            )
        )


class TorchFlashBackend(FlashAttentionBackend):
    """Version 2 as torch itself ships it: nothing to install, no soft cap, no pages."""

    name = "torch-flash"
    capabilities = ((8, 0), None)
    unlimited = None

    def unsupported(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """Say why a layer cannot be served; an empty list means that it can."""
        reasons = super().unsupported(spec, dtype, device)
        if spec.soft_cap is not None:
            reasons.append(f"soft cap {spec.soft_cap}: torch's kernels have none")
        return reasons

    def unsupported_paged(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, page_size: int
    ) -> list[str]:
        """Say that pages are not served."""
        reason = f"torch's kernels read no pages of {page_size} tokens"
        return [*self.unsupported(spec, dtype, device), reason]

    def library(self) -> ModuleType | str:
        """Return torch's operators, or why they cannot be used."""
        operators: ModuleType = torch.ops.aten
        if not hasattr(operators, "_flash_attention_forward"):
            return "torch has no flash attention operator"
        return operators

    def run_ragged(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Attend with keys and values that lie beside the queries; returns [T, H, D]."""
        operators = self.library()
        assert not isinstance(operators, str), operators
        left, right = self.window(spec)
        return _first(
            operators._flash_attention_forward(
                q_THD,
                k_TKD,
                v_TKD,
                lengths.cu_seqlens_q,
                lengths.cu_seqlens_k,
                lengths.max_q,
                lengths.max_k,
                0.0,  # dropout
                spec.causal,
                False,  # no debug mask
                scale=spec.scale,
                window_size_left=left,
                window_size_right=right,
            )
        )

    def run_paged(
        self, q_THD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor, lengths: Lengths, spec: AttentionSpec
    ) -> Tensor:
        """Never called: `unsupported_paged` has reasons for every layer."""
        raise NotImplementedError("torch's flash attention reads no pages")


def _first(result: "Tensor | tuple[Tensor, ...]") -> Tensor:
    """The output; some versions return statistics beside it."""
    return result[0] if isinstance(result, tuple) else result


class _RaggedBatch:
    """Keys and values are those of this forward pass."""

    def __init__(
        self, backend: FlashAttentionBackend, layout: RaggedLayout, max_seqlen: int
    ) -> None:
        self._backend = backend
        places = layout.cu_seqlens
        self._lengths = Lengths(places, max_seqlen, max_seqlen, places)

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        if not q_THD.shape[0]:
            return q_THD.new_empty(q_THD.shape)
        return self._backend.run_ragged(q_THD, k_TKD, v_TKD, self._lengths, spec)

    def update(self, layout: RaggedLayout | PagedLayout) -> None:
        assert isinstance(layout, RaggedLayout)
        assert layout.cu_seqlens is self._lengths.cu_seqlens_q, "other device tensors"
        assert layout.max_seqlen <= self._lengths.max_q


class _PagedBatch(StoredAttention):
    """Keys and values are read from the pages."""

    def __init__(
        self, backend: FlashAttentionBackend, layout: PagedLayout, pages: KVPages, max_kv_len: int
    ) -> None:
        super().__init__(pages, layout.slot_mapping)
        self._backend = backend
        device = layout.block_table.device
        kv_lens = _kv_lens(layout)
        self._lengths = Lengths(
            layout.cu_seqlens_q,
            layout.max_seqlen_q,
            max_kv_len,
            _cumulated(kv_lens).to(device),
            kv_lens.to(device),
            layout.block_table,
        )

    def attend_stored(self, q_THD: Tensor, spec: AttentionSpec) -> Tensor:
        if not q_THD.shape[0]:
            return q_THD.new_empty(q_THD.shape)
        keys, values = self.keys_and_values(spec.layer)
        return self._backend.run_paged(q_THD, keys, values, self._lengths, spec)

    def update(self, layout: RaggedLayout | PagedLayout) -> None:
        assert isinstance(layout, PagedLayout)
        lengths, kv_lens = self._lengths, _kv_lens(layout)
        assert layout.block_table is lengths.block_table, "other device tensors"
        assert layout.max_kv_len <= lengths.max_k
        assert layout.max_seqlen_q <= lengths.max_q
        assert lengths.kv_lens is not None
        lengths.kv_lens.copy_(kv_lens, non_blocking=True)
        lengths.cu_seqlens_k.copy_(_cumulated(kv_lens), non_blocking=True)


def _kv_lens(layout: PagedLayout) -> Tensor:
    return torch.tensor(layout.kv_lens, dtype=torch.int32)


def _cumulated(lengths: Tensor) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int32)
    return torch.cat((zero, lengths.cumsum(0, dtype=torch.int32)))
