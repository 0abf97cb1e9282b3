"""Pooling of packed sequences, with the cut and the normalisation behind it.

A program sums one sequence over a block of channels, token block by token block, so a row's bits
depend on its own sequence alone. Normalising needs whole rows and follows in a kernel of its own.

Shape letters: T tokens, B sequences, C channels, D channels that are kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.triton.launch import DTYPES, MAX_CHANNELS, power_of_two

MODES = ("mean", "mean_sqrt_len", "cls", "last")
BLOCK_T, BLOCK_C = 32, 64


@triton.jit
def pool_kernel(
    out, x, cu_seqlens, starts, C, D,
    MODE: tl.constexpr, STARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[sequence, block] = the pooled channels of that block, in float32."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    kept = channel < D
    first = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    if STARTS:
        first += tl.load(starts + sequence)
    count = end - first
    if MODE == "cls" or MODE == "last":
        row = (first if MODE == "cls" else end - 1) + tl.zeros((BLOCK_C,), dtype=tl.int64)
        inside = kept & (row >= first) & (row < end)
        pooled_C = tl.load(x + row * C + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        sums = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
        for start in range(first, end, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            inside = (token < end)[:, None] & kept[None, :]
            at = token[:, None] * C + channel[None, :]
            sums += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        divisor = tl.maximum(count, 1).to(tl.float32)
        if MODE == "mean_sqrt_len":
            divisor = tl.sqrt(divisor)
        pooled_C = tl.sum(sums, 0) / divisor
    tl.store(out + sequence.to(tl.int64) * D + channel, pooled_C, mask=kept)


@triton.jit
def normalize_kernel(x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Scale one float32 row to length 1 in place; squares neither overflow nor vanish."""
    channel = tl.arange(0, BLOCK_D)
    at = x + tl.program_id(0).to(tl.int64) * D + channel
    row_D = tl.load(at, mask=channel < D, other=0.0)
    # NaN must stay NaN: a maximum may leave it out, a sum does not.
    is_nan = tl.sum(tl.where(row_D == row_D, 0.0, 1.0), 0) > 0
    largest = tl.max(tl.abs(row_D), 0)
    row_D = row_D / tl.where(largest == 0, 1.0, largest)
    length = tl.sqrt(tl.sum(row_D * row_D, 0))
    row_D = row_D / tl.where(length == 0, 1.0, length)
    row_D = tl.where(is_nan, float("nan"), row_D)
    tl.store(at, row_D, mask=channel < D)


def pool_and_finish(
    x_TC: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor | None,
    mode: str,
    width: int,
    normalize: bool,
) -> Tensor | None:
    """Return what `rose.kernels.epilogue.pool_and_finish` does, or None for the other modes."""
    if mode not in MODES or x_TC.dtype not in DTYPES or width > MAX_CHANNELS:
        return None
    x_TC = x_TC.contiguous()
    count = cu_seqlens.shape[0] - 1
    out_BD = torch.empty((count, width), dtype=torch.float32, device=x_TC.device)
    if out_BD.numel():
        block = min(BLOCK_C, power_of_two(width))
        pool_kernel[(count, triton.cdiv(width, block))](
            out_BD, x_TC, cu_seqlens, cu_seqlens if starts is None else starts,
            x_TC.shape[1], width, MODE=mode, STARTS=starts is not None,
            BLOCK_T=BLOCK_T, BLOCK_C=block, num_warps=4,
        )  # fmt: skip
        if normalize:
            normalize_kernel[(count,)](out_BD, D=width, BLOCK_D=power_of_two(width), num_warps=4)
    return out_BD
