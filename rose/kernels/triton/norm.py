"""RMS norm and layer norm, alone and with the residual addition before them.

Shape letters: T rows, C channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.triton.launch import MAX_CHANNELS, covers, row_blocks


@triton.jit
def _add_residual(x, residual, sums, at, inside, ADD: tl.constexpr, KEEP: tl.constexpr):
    """Load rows in float32, with the residual added and rounded to the rows' dtype."""
    x_TC = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        residual_TC = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        x_TC = (x_TC.to(tl.float32) + residual_TC).to(x.dtype.element_ty)
        if KEEP:
            tl.store(sums + at, x_TC, mask=inside)
    return x_TC.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    out, sums, x, residual, weight, num_rows, eps, offset,
    C: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write x / rms(x) * weight for BLOCK_T rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_C)
    inside = (row < num_rows)[:, None] & (channel < C)[None, :]
    at = row[:, None] * C + channel[None, :]
    x_TC = _add_residual(x, residual, sums, at, inside, ADD, True)
    weight_C = tl.load(weight + channel, mask=channel < C, other=0.0).to(tl.float32)
    mean_T = tl.sum(x_TC * x_TC, 1) / C
    x_TC = x_TC * tl.rsqrt(mean_T + eps)[:, None]
    if OFFSET:
        x_TC = x_TC * (weight_C + offset)[None, :]
    else:
        x_TC = x_TC.to(out.dtype.element_ty).to(tl.float32) * weight_C[None, :]
    tl.store(out + at, x_TC.to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_kernel(
    out, sums, x, residual, weight, bias, num_rows, eps,
    C: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write (x - mean) / deviation * weight + bias for BLOCK_T rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_C)
    inside = (row < num_rows)[:, None] & (channel < C)[None, :]
    at = row[:, None] * C + channel[None, :]
    x_TC = _add_residual(x, residual, sums, at, inside, ADD, KEEP)
    mean_T = tl.sum(x_TC, 1) / C
    centred_TC = tl.where(inside, x_TC - mean_T[:, None], 0.0)
    variance_T = tl.sum(centred_TC * centred_TC, 1) / C
    weight_C = tl.load(weight + channel, mask=channel < C, other=0.0).to(tl.float32)
    x_TC = centred_TC * tl.rsqrt(variance_T + eps)[:, None] * weight_C[None, :]
    if BIAS:
        x_TC += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, x_TC.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x_TC: Tensor, weight_C: Tensor, eps: float, *, weight_offset: float = 0.0
) -> Tensor | None:
    """Return what `rose.kernels.norm.rms_norm` does, or None for other dtypes or wide rows."""
    done = _rms_norm(x_TC, None, weight_C, eps, weight_offset)
    return None if done is None else done[0]


def add_rms_norm(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor] | None:
    """Return what `rose.kernels.norm.add_rms_norm` does, or None."""
    return _rms_norm(x_TC, residual_TC, weight_C, eps, weight_offset)


def _rms_norm(
    x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor] | None:
    channels = x_TC.shape[-1]
    if channels > MAX_CHANNELS or not covers(x_TC, residual_TC, weight_C):
        return None
    x_TC = x_TC.contiguous()
    residual = x_TC if residual_TC is None else residual_TC.contiguous()
    out_TC = x_TC.new_empty(x_TC.shape)
    sums_TC = out_TC if residual_TC is None else x_TC.new_empty(x_TC.shape)
    block_T, block_C, warps = row_blocks(channels)
    num_rows = x_TC.numel() // channels
    if num_rows:
        rms_norm_kernel[(triton.cdiv(num_rows, block_T),)](
            out_TC, sums_TC, x_TC, residual, weight_C, num_rows, eps, offset,
            C=channels, ADD=residual_TC is not None, OFFSET=bool(offset),
            BLOCK_T=block_T, BLOCK_C=block_C, num_warps=warps,
        )  # fmt: skip
    return out_TC, sums_TC


def layer_norm(x_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float) -> Tensor | None:
    """Return what `rose.kernels.norm.layer_norm` does, or None for other dtypes or wide rows."""
    done = _layer_norm(x_TC, None, weight_C, bias_C, eps, keep=False)
    return None if done is None else done[0]


def add_layer_norm(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> Tensor | None:
    """Return what `rose.kernels.norm.add_layer_norm` does, or None."""
    done = _layer_norm(x_TC, residual_TC, weight_C, bias_C, eps, keep=False)
    return None if done is None else done[0]


def add_layer_norm_with_sum(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> tuple[Tensor, Tensor] | None:
    """Return what `rose.kernels.norm.add_layer_norm_with_sum` does, or None."""
    return _layer_norm(x_TC, residual_TC, weight_C, bias_C, eps, keep=True)


def _layer_norm(
    x_TC: Tensor,
    residual_TC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor | None,
    eps: float,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor] | None:
    channels = x_TC.shape[-1]
    same_shape = residual_TC is None or residual_TC.shape == x_TC.shape
    if channels > MAX_CHANNELS or not same_shape:
        return None
    if not covers(x_TC, residual_TC, weight_C, bias_C):
        return None
    x_TC = x_TC.contiguous()
    residual = x_TC if residual_TC is None else residual_TC.contiguous()
    out_TC = x_TC.new_empty(x_TC.shape)
    sums_TC = x_TC.new_empty(x_TC.shape) if keep else out_TC
    block_T, block_C, warps = row_blocks(channels)
    num_rows = x_TC.numel() // channels
    if num_rows:
        layer_norm_kernel[(triton.cdiv(num_rows, block_T),)](
            out_TC, sums_TC, x_TC, residual, weight_C,
            weight_C if bias_C is None else bias_C, num_rows, eps,
            C=channels, ADD=residual_TC is not None, KEEP=keep, BIAS=bias_C is not None,
            BLOCK_T=block_T, BLOCK_C=block_C, num_warps=warps,
        )  # fmt: skip
    return out_TC, sums_TC
