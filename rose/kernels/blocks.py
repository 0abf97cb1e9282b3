"""Whole layers by one kernel, where the way between kernels costs about as much as they do.

A model builds its layers from modules; where `make_decoder_block` or `make_encoder_block` finds a
kernel for the prepared parts, a layer asks that first. A block declines a batch that it cannot
serve by returning None, and then the modules compute it.

Shape letters: T tokens, C channels, D head size, R rotary channels.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from rose.kernels.cpu.gemm import PackedMatrix

if TYPE_CHECKING:
    from rose.kernels.attention.base import AttentionBatch, AttentionSpec
    from rose.kernels.heads import HeadNorms, Rotation
    from rose.kernels.linear import LinearOp


class Norm(NamedTuple):
    """A layer norm, or an RMS norm, which has no bias and may have an offset of its weight."""

    weight: Tensor  # [C]
    bias: Tensor | None  # [C]
    eps: float
    weight_offset: float = 0.0


class BlockParts(NamedTuple):
    """What attention and an MLP of two matrix products are made of.

    `qkv` gives queries, keys and values side by side; `up` has the activation, and the gate where
    there is one. `head_norms` None is none.
    """

    qkv: "LinearOp"
    output: "LinearOp"
    spec: "AttentionSpec"
    up: "LinearOp"
    down: "LinearOp"
    attention_norm: Norm
    mlp_norm: Norm
    head_norms: "HeadNorms | None" = None


class DecoderBlock(Protocol):
    """A layer with an RMS norm before attention and one before the MLP."""

    def __call__(
        self,
        x_TC: Tensor,
        residual_TC: Tensor | None,
        rotation: "Rotation",
        attention: "AttentionBatch",
    ) -> tuple[Tensor, Tensor] | None:
        """Return the MLP's output and the residual to add to it; no residual is 0."""
        ...


class EncoderBlock(Protocol):
    """A layer with a layer norm of the sum after attention and one after the MLP."""

    def __call__(
        self, x_TC: Tensor, rotation: "Rotation | None", attention: "AttentionBatch"
    ) -> Tensor | None:
        """Return [T, C]."""
        ...


def make_decoder_block(parts: BlockParts) -> DecoderBlock | None:
    """Make a layer with norms before its parts, or return None where there is no kernel."""
    if not _suits_cpu(parts):
        return None
    from rose.kernels.cpu.blocks import CpuDecoderBlock

    return CpuDecoderBlock(parts)


def make_encoder_block(parts: BlockParts) -> EncoderBlock | None:
    """Make a layer with norms after its parts, or return None where there is no kernel."""
    if not _suits_cpu(parts):
        return None
    from rose.kernels.cpu.blocks import CpuEncoderBlock

    return CpuEncoderBlock(parts)


def _suits_cpu(parts: BlockParts) -> bool:
    matrices = (parts.qkv, parts.output, parts.up, parts.down)
    first, second = parts.attention_norm, parts.mlp_norm
    tensors = [t for t in (first.weight, first.bias, second.weight, second.bias) if t is not None]
    return (
        all(isinstance(op, PackedMatrix) for op in matrices)
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and (first.eps, first.weight_offset) == (second.eps, second.weight_offset)
    )
