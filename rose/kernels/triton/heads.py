"""Queries and keys of one layer: norm per head, rotation, keys and values into their pages.

A program has one token, and a block of its query heads, its key heads, or its values. Shape
letters: T tokens, H query heads, K key/value heads, D head size, R rotary channels, P pages, S
slots of a page.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.heads import HeadNorms, Rotation
from rose.kernels.triton.launch import covers, power_of_two

BLOCK_H = 8  # heads of a program
BLOCK_V = 1024  # elements of a program that copies


@triton.jit
def _weigh(x, weight, offset, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """Apply a norm's weight, rounded where the torch version rounds."""
    x = x * (weight + offset) if OFFSET else x.to(dtype).to(tl.float32) * weight
    return x.to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    out, x, weight, cos, sin, first, eps, offset,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads from `first` on of one token; all pointers are that token's."""
    HALF: tl.constexpr = R // 2
    dtype: tl.constexpr = out.dtype.element_ty
    head = first + tl.arange(0, BLOCK_H)
    pair, rest = tl.arange(0, BLOCK_R), R + tl.arange(0, BLOCK_D)
    is_pair = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    is_rest = (head < HEADS)[:, None] & (rest < D)[None, :]
    low = head[:, None] * D + pair[None, :]
    x1 = tl.load(x + low, mask=is_pair, other=0.0).to(tl.float32)
    x2 = tl.load(x + low + HALF, mask=is_pair, other=0.0).to(tl.float32)
    x3 = tl.load(x + head[:, None] * D + rest[None, :], mask=is_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1) + tl.sum(x3 * x3, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        w1 = tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        w3 = tl.load(weight + rest, mask=rest < D, other=0.0).to(tl.float32)[None, :]
        x1 = _weigh(x1 * scale, w1, offset, dtype, OFFSET)
        x2 = _weigh(x2 * scale, w2, offset, dtype, OFFSET)
        x3 = _weigh(x3 * scale, w3, offset, dtype, OFFSET)
    cos1 = tl.load(cos + pair, mask=pair < HALF, other=0.0)[None, :]
    cos2 = tl.load(cos + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin1 = tl.load(sin + pair, mask=pair < HALF, other=0.0)[None, :]
    sin2 = tl.load(sin + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    tl.store(out + low, (x1 * cos1 - x2 * sin1).to(dtype), mask=is_pair)
    tl.store(out + low + HALF, (x2 * cos2 + x1 * sin2).to(dtype), mask=is_pair)
    tl.store(out + head[:, None] * D + rest[None, :], x3.to(dtype), mask=is_rest)


@triton.jit
def _copy(out, x, block, SIZE: tl.constexpr, BLOCK_V: tl.constexpr):
    at = block * BLOCK_V + tl.arange(0, BLOCK_V)
    tl.store(out + at, tl.load(x + at, mask=at < SIZE, other=0.0), mask=at < SIZE)


@triton.jit
def heads_kernel(
    q_out, k_out, v_out, q, k, v, q_weight, k_weight, cos, sin, slots,
    q_stride, k_stride, v_stride, eps, offset,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, STORE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Norm and rotate queries and keys; with STORE, keys and values go to their slots."""
    Q_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    K_BLOCKS: tl.constexpr = (K + BLOCK_H - 1) // BLOCK_H
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = token
    if STORE:
        place = tl.load(slots + token)
    if block < Q_BLOCKS:
        _rotate_heads(
            q_out + token * H * D, q + token * q_stride, q_weight, cos + token * R,
            sin + token * R, block * BLOCK_H, eps, offset,
            H, D, R, NORM, OFFSET, BLOCK_H, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    elif block < Q_BLOCKS + K_BLOCKS:
        _rotate_heads(
            k_out + place * K * D, k + token * k_stride, k_weight, cos + token * R,
            sin + token * R, (block - Q_BLOCKS) * BLOCK_H, eps, offset,
            K, D, R, NORM, OFFSET, BLOCK_H, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        value_block = block - Q_BLOCKS - K_BLOCKS
        _copy(v_out + place * K * D, v + token * v_stride, value_block, K * D, BLOCK_V)


@triton.jit
def store_kernel(
    k_out, v_out, k, v, slots, k_stride, v_stride, SIZE: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Copy one token's keys (second axis 0) or values (1) into its slot."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slots + token) * SIZE
    if tl.program_id(1) == 0:
        _copy(k_out + place, k + token * k_stride, tl.program_id(2), SIZE, BLOCK_V)
    else:
        _copy(v_out + place, v + token * v_stride, tl.program_id(2), SIZE, BLOCK_V)


def norm_and_rotate(
    q_THD: Tensor, k_TKD: Tensor, rotation: Rotation, norms: HeadNorms | None
) -> tuple[Tensor, Tensor] | None:
    """Return what `rose.kernels.heads.norm_and_rotate` does, or None for other dtypes."""
    if not _covers(q_THD, k_TKD, rotation, norms):
        return None
    k_out_TKD = k_TKD.new_empty(k_TKD.shape)
    q_out_THD = _launch(q_THD, k_TKD, None, rotation, norms, k_out_TKD, k_out_TKD, None)
    return q_out_THD, k_out_TKD


def norm_rotate_and_store(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    keys_PSKD: Tensor,
    values_PSKD: Tensor,
    slots_T: Tensor,
) -> Tensor | None:
    """Return what `rose.kernels.heads.norm_rotate_and_store` does, or None for other dtypes."""
    if not _covers(q_THD, k_TKD, rotation, norms) or not covers(k_TKD, v_TKD, keys_PSKD):
        return None
    assert keys_PSKD.is_contiguous()
    assert values_PSKD.is_contiguous()
    return _launch(q_THD, k_TKD, v_TKD, rotation, norms, keys_PSKD, values_PSKD, slots_T)


def store_kv(
    k_TKD: Tensor, v_TKD: Tensor, keys_PSKD: Tensor, values_PSKD: Tensor, slots_T: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return what `rose.kernels.heads.store_kv` does, or None for other dtypes."""
    if not covers(k_TKD, v_TKD, keys_PSKD, values_PSKD):
        return None
    assert keys_PSKD.is_contiguous()
    assert values_PSKD.is_contiguous()
    k_TKD, v_TKD = _dense_heads(k_TKD), _dense_heads(v_TKD)
    size = k_TKD.shape[1] * k_TKD.shape[2]
    if k_TKD.shape[0]:
        store_kernel[(k_TKD.shape[0], 2, triton.cdiv(size, BLOCK_V))](
            keys_PSKD, values_PSKD, k_TKD, v_TKD, slots_T, k_TKD.stride(0), v_TKD.stride(0),
            SIZE=size, BLOCK_V=BLOCK_V,
        )  # fmt: skip
    return keys_PSKD, values_PSKD


def _covers(q_THD: Tensor, k_TKD: Tensor, rotation: Rotation, norms: HeadNorms | None) -> bool:
    weights = (norms.q_weight, norms.k_weight) if norms is not None else ()
    is_float32 = all(x.dtype == torch.float32 for x in rotation)
    return is_float32 and covers(q_THD, k_TKD, *weights)


def _dense_heads(x_THD: Tensor) -> Tensor:
    """Heads of one token side by side; tokens may lie apart, as in a fused projection."""
    return x_THD if x_THD.stride()[1:] == (x_THD.shape[2], 1) else x_THD.contiguous()


def _launch(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor | None,
    rotation: Rotation,
    norms: HeadNorms | None,
    k_out: Tensor,
    v_out: Tensor,
    slots_T: Tensor | None,
) -> Tensor:
    """Run the kernel over all tokens; returns the queries."""
    q_THD, k_TKD = _dense_heads(q_THD), _dense_heads(k_TKD)
    v_dense = k_TKD if v_TKD is None else _dense_heads(v_TKD)
    cos_TR, sin_TR = (x.contiguous() for x in rotation)
    tokens, heads, dim = q_THD.shape
    kv_heads, rotary = k_TKD.shape[1], cos_TR.shape[1]
    q_out_THD = q_THD.new_empty(q_THD.shape)
    blocks = triton.cdiv(heads, BLOCK_H) + triton.cdiv(kv_heads, BLOCK_H)
    if v_TKD is not None:
        blocks += triton.cdiv(kv_heads * dim, BLOCK_V)
    if tokens:
        heads_kernel[(tokens, blocks)](
            q_out_THD, k_out, v_out, q_THD, k_TKD, v_dense,
            cos_TR if norms is None else norms.q_weight,
            cos_TR if norms is None else norms.k_weight,
            cos_TR, sin_TR, cos_TR if slots_T is None else slots_T,
            q_THD.stride(0), k_TKD.stride(0), v_dense.stride(0),
            0.0 if norms is None else norms.eps, 0.0 if norms is None else norms.weight_offset,
            H=heads, K=kv_heads, D=dim, R=rotary, NORM=norms is not None,
            OFFSET=norms is not None and bool(norms.weight_offset), STORE=slots_T is not None,
            BLOCK_H=BLOCK_H, BLOCK_R=power_of_two(rotary // 2),
            BLOCK_D=power_of_two(max(1, dim - rotary)), BLOCK_V=BLOCK_V,
        )  # fmt: skip
    return q_out_THD
