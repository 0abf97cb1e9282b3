"""Whole layers by one call of the CPU kernels. Shape letters: T tokens, C channels."""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rose.kernels.attention.cpu import CpuBatch
from rose.kernels.blocks import BlockParts
from rose.kernels.cpu.gemm import PackedMatrix
from rose.kernels.cpu.library import (
    DecoderLayerStruct,
    EncoderLayerStruct,
    HeadsStruct,
    SelfAttentionStruct,
)

if TYPE_CHECKING:
    from rose.kernels.attention.base import AttentionBatch
    from rose.kernels.heads import Rotation


class _Block:
    """What the blocks share: the parts, which must stay alive, and how to enter a batch.

    A block serves one thread at a time, as its device's worker does.
    """

    def __init__(self, parts: BlockParts) -> None:
        assert isinstance(parts.qkv, PackedMatrix)
        self._parts = parts
        self._library = parts.qkv.library
        spec, norms = parts.spec, parts.head_norms
        self._heads = HeadsStruct(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if norms is not None:
            self._heads.q_norm = norms.q_weight.data_ptr()
            self._heads.k_norm = norms.k_weight.data_ptr()
            self._heads.norm_offset, self._heads.eps = norms.weight_offset, norms.eps

    def _attention(self) -> SelfAttentionStruct:
        heads = ctypes.addressof(self._heads)
        return SelfAttentionStruct(_address(self._parts.qkv), _address(self._parts.output), heads)

    def _enter(
        self,
        struct: SelfAttentionStruct,
        x_TC: Tensor,
        rotation: "Rotation | None",
        attention: "AttentionBatch",
    ) -> int | None:
        """Set what changes with the batch; returns where the batch's struct lies, if it can."""
        if not (isinstance(attention, CpuBatch) and _is_plain(x_TC)):
            return None
        batch = attention.struct
        batch.cos, batch.sin = None, None
        if rotation is not None:
            cos_TR, sin_TR = rotation
            if not (_is_plain(cos_TR) and _is_plain(sin_TR)):
                return None
            batch.cos, batch.sin = cos_TR.data_ptr(), sin_TR.data_ptr()
            self._heads.rotary = cos_TR.shape[1]
        struct.spec = attention.spec_address(self._parts.spec)
        attention.enter(self._parts.spec.layer)
        assert batch.rows == x_TC.shape[0]
        return ctypes.addressof(batch)


class CpuDecoderBlock(_Block):
    """A layer with norms before attention and MLP."""

    def __init__(self, parts: BlockParts) -> None:
        """Note where the parts lie."""
        super().__init__(parts)
        norm = parts.attention_norm
        self._struct = DecoderLayerStruct(
            self._attention(),
            _address(parts.up),
            _address(parts.down),
            norm.weight.data_ptr(),
            parts.mlp_norm.weight.data_ptr(),
            norm.weight_offset,
            norm.eps,
        )
        self._address = ctypes.addressof(self._struct)

    def __call__(
        self,
        x_TC: Tensor,
        residual_TC: Tensor | None,
        rotation: "Rotation",
        attention: "AttentionBatch",
    ) -> tuple[Tensor, Tensor] | None:
        """Return the MLP's output and the residual to add to it."""
        batch = self._enter(self._struct.attention, x_TC, rotation, attention)
        if batch is None or not (residual_TC is None or _is_plain(residual_TC)):
            return None
        y_TC, next_TC = torch.empty_like(x_TC), torch.empty_like(x_TC)
        self._library.decoder_layer(
            self._address,
            batch,
            x_TC.data_ptr(),
            None if residual_TC is None else residual_TC.data_ptr(),
            y_TC.data_ptr(),
            next_TC.data_ptr(),
        )
        return y_TC, next_TC


class CpuEncoderBlock(_Block):
    """A layer with norms after attention and MLP."""

    def __init__(self, parts: BlockParts) -> None:
        """Note where the parts lie."""
        super().__init__(parts)
        first, second = parts.attention_norm, parts.mlp_norm
        self._struct = EncoderLayerStruct(
            self._attention(),
            _address(parts.up),
            _address(parts.down),
            first.weight.data_ptr(),
            None if first.bias is None else first.bias.data_ptr(),
            second.weight.data_ptr(),
            None if second.bias is None else second.bias.data_ptr(),
            first.eps,
        )
        self._address = ctypes.addressof(self._struct)

    def __call__(
        self, x_TC: Tensor, rotation: "Rotation | None", attention: "AttentionBatch"
    ) -> Tensor | None:
        """Return [T, C]."""
        batch = self._enter(self._struct.attention, x_TC, rotation, attention)
        if batch is None:
            return None
        y_TC = torch.empty_like(x_TC)
        self._library.encoder_layer(self._address, batch, x_TC.data_ptr(), y_TC.data_ptr())
        return y_TC


def _address(op: object) -> int:
    assert isinstance(op, PackedMatrix)
    return op.address


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()
