"""Attention by the compiled CPU kernels, float32.

Keys and values are read where they lie: beside the new tokens, or in their pages. The bits of a
result depend on its query and the keys that it sees, not on the batch, on chunks or on pages.

Shape letters: T tokens of the batch, H query heads, K key/value heads, D head size.
"""

import ctypes
from dataclasses import dataclass
from itertools import accumulate

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
from rose.kernels.attention.stored import StoredAttention
from rose.kernels.cpu.library import (
    AttentionStruct,
    BatchStruct,
    SequencesStruct,
    load_library,
)

UNLIMITED = 1 << 40  # more positions than any sequence has
BIAS_MARGIN = 64  # distances beyond the longest that are read, and not used, with whole vectors


class CpuBackend(AttentionBackend):
    """Attention by ROSE's own kernels for CPUs."""

    name = "cpu"

    def __init__(self) -> None:
        """Start without knowing any layer."""
        self._layers = _Layers()

    def unsupported(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """Say why a layer cannot be served; an empty list means that it can."""
        reasons = []
        if device.type != "cpu":
            reasons.append(f"device {device.type} is not a CPU")
        if dtype != torch.float32:
            reasons.append(f"dtype {dtype} is not torch.float32")
        if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
            reasons.append(
                f"{spec.num_heads} query heads do not divide among {spec.num_kv_heads} kv heads"
            )
        if any(side is not None and side < 0 for side in spec.window):
            reasons.append(f"window {spec.window} has a negative side")
        if spec.soft_cap is not None and spec.soft_cap <= 0:
            reasons.append(f"soft cap {spec.soft_cap} is not positive")
        if not reasons and load_library() is None:
            reasons.append("the CPU kernels are switched off or cannot be built")
        return reasons

    def plan_ragged(self, layout: RaggedLayout) -> AttentionBatch:
        """Plan a batch without a KV cache."""
        return _RaggedBatch(layout, self._layers)

    def plan_paged(self, layout: PagedLayout, pages: KVPages) -> AttentionBatch:
        """Plan a batch whose keys and values are read from and written to `pages`."""
        return _PagedBatch(layout, pages, self._layers)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's facts for the kernels, good for sequences of up to `longest` tokens."""

    spec: AttentionSpec
    struct: AttentionStruct
    bias: Tensor | None  # what the struct points to
    longest: int | None


class _Layers:
    """The layers met so far. Specs are told apart by identity, which is quicker than by value."""

    def __init__(self) -> None:
        self._known: dict[int, _Layer] = {}

    def address(self, spec: AttentionSpec, longest: int) -> int:
        """Where the struct of a layer lies."""
        layer = self._known.get(id(spec))  # whose spec is alive, so no other has its id
        if layer is None or (layer.longest is not None and layer.longest < longest):
            layer = self._known[id(spec)] = _convert(spec, longest)
        return ctypes.addressof(layer.struct)


def _convert(spec: AttentionSpec, longest: int) -> _Layer:
    left, right = (UNLIMITED if side is None else side for side in spec.window)
    bias, center = None, 0
    if spec.bias is not None:
        longest = 1 << longest.bit_length()  # so that growing sequences rarely come here
        center = longest + BIAS_MARGIN
        bias = spec.bias(torch.arange(-center, center + 1)).float().contiguous()
    struct = AttentionStruct(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        left,
        0 if spec.causal else right,
        None if bias is None else bias.data_ptr(),
        center,
        2 * center + 1,
        spec.scale,
        spec.soft_cap or 0.0,
    )
    return _Layer(spec, struct, bias, None if bias is None else longest)


class CpuBatch:
    """The sequences of a batch; also what kernels of whole layers attend with."""

    def __init__(
        self,
        layers: _Layers,
        query_lens: tuple[int, ...],
        kv_lens: tuple[int, ...],
        block_table: Tensor | None = None,
        page_size: int = 0,
    ) -> None:
        """Keep the batch's facts in C's form."""
        library = load_library()
        assert library is not None, "a back end that cannot serve was chosen"
        self.library = library
        self._layers = layers
        starts = tuple(accumulate(query_lens, initial=0))[:-1]
        self._facts = torch.tensor([starts, query_lens, kv_lens], dtype=torch.int64)
        self._table = None if block_table is None else block_table.contiguous()
        self._longest = max(kv_lens, default=0)
        self._sequences = SequencesStruct(
            len(query_lens),
            *(row.data_ptr() for row in self._facts),
            None if self._table is None else self._table.data_ptr(),
            0 if self._table is None else self._table.shape[1],
            page_size,
        )
        self.struct = BatchStruct(
            rows=sum(query_lens),
            sequences=ctypes.addressof(self._sequences),
            threads=torch.get_num_threads(),
        )

    def spec_address(self, spec: AttentionSpec) -> int:
        """Where the kernels find the facts of a layer."""
        return self._layers.address(spec, self._longest)

    def enter(self, layer: int) -> None:
        """Make `struct` that of a layer."""

    def run(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend; keys and values are those of the tokens, or all slots of the pages."""
        out_THD = q_THD.new_empty(q_THD.shape)
        self.library.attend(
            self.spec_address(spec),
            self.struct.sequences,
            q_THD.data_ptr(),
            q_THD.stride(0),
            k_TKD.data_ptr(),
            k_TKD.stride(0),
            v_TKD.data_ptr(),
            v_TKD.stride(0),
            out_THD.data_ptr(),
            self.struct.threads,
        )
        return out_THD


class _RaggedBatch(CpuBatch):
    """Keys and values are those of this forward pass."""

    def __init__(self, layout: RaggedLayout, layers: _Layers) -> None:
        super().__init__(layers, layout.lengths, layout.lengths)

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        return self.run(_dense_heads(q_THD), _dense_heads(k_TKD), _dense_heads(v_TKD), spec)


class _PagedBatch(StoredAttention, CpuBatch):
    """Keys and values are written to pages first, and all are read there."""

    def __init__(self, layout: PagedLayout, pages: KVPages, layers: _Layers) -> None:
        StoredAttention.__init__(self, pages, layout.slot_mapping.contiguous())
        CpuBatch.__init__(
            self, layers, layout.query_lens, layout.kv_lens, layout.block_table, pages.page_size
        )
        self.struct.slots = self.slots_T.data_ptr()

    def enter(self, layer: int) -> None:
        keys, values = self.keys_and_values(layer)
        self.struct.keys, self.struct.values = keys.data_ptr(), values.data_ptr()

    def attend_stored(self, q_THD: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.keys_and_values(spec.layer)
        return self.run(_dense_heads(q_THD), keys.flatten(0, 1), values.flatten(0, 1), spec)


def _dense_heads(x_THD: Tensor) -> Tensor:
    """Return `x_THD`, or a copy where the heads of a token do not lie side by side."""
    if x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]:
        return x_THD
    return x_THD.contiguous()
