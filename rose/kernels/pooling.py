"""Pooling of packed hidden states: one vector per sequence.

Every function takes hidden states [T, C] of any floating dtype, `cu_seqlens` [B + 1] (integers,
first 0, last T) and, optionally, `starts` [B]: how many leading tokens of each sequence are left
out (a prompt). It returns float32 [B, C]. Sums run over one sequence's tokens in their order, so
a row's bits do not depend on the other sequences. A sequence without remaining tokens gives zeros.

Shape letters: T tokens, B sequences, C channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Pooling = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def mean(x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None = None) -> Tensor:
    """Mean over the tokens."""
    count_B1 = _counts(cu_seqlens, starts).clamp(min=1).unsqueeze(1)
    return _sum(x_TC.float(), cu_seqlens, starts).div_(count_B1)


def mean_sqrt_len(x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None = None) -> Tensor:
    """Sum over the tokens divided by the square root of their number."""
    count_B1 = _counts(cu_seqlens, starts).clamp(min=1).unsqueeze(1)
    return _sum(x_TC.float(), cu_seqlens, starts).div_(count_B1.sqrt())


def weighted_mean(x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None = None) -> Tensor:
    """Mean with weights 1, 2, ... n by position in the sequence (Muennighoff, 2022).

    Tokens that are left out do not shift the weights of the others.
    """
    length_B = cu_seqlens.diff()
    first_T = torch.repeat_interleave(cu_seqlens[:-1], length_B, output_size=x_TC.shape[0])
    weight_T = (torch.arange(1, x_TC.shape[0] + 1, device=x_TC.device) - first_T).float()
    total_BC = _sum(x_TC * weight_T.unsqueeze(1), cu_seqlens, starts)
    start_B = torch.zeros_like(length_B) if starts is None else starts
    weight_B = (length_B * (length_B + 1) - start_B * (start_B + 1)).float() / 2
    return total_BC / weight_B.clamp(min=1).unsqueeze(1)


def maximum(x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None = None) -> Tensor:
    """Largest value of each channel over the tokens."""
    pooled_BC = _segment_reduce(x_TC.float(), cu_seqlens, starts, "max")
    return pooled_BC.masked_fill_((_counts(cu_seqlens, starts) <= 0).unsqueeze(1), 0.0)


def first(x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None = None) -> Tensor:
    """First token ("cls"); with `starts`, the first of those that remain."""
    index_B = cu_seqlens[:-1] if starts is None else cu_seqlens[:-1] + starts
    return _rows(x_TC, index_B, cu_seqlens, starts)


def last(x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None = None) -> Tensor:
    """Last token."""
    return _rows(x_TC, cu_seqlens[1:] - 1, cu_seqlens, starts)


POOLINGS: dict[str, Pooling] = {
    "cls": first,
    "last": last,
    "max": maximum,
    "mean": mean,
    "mean_sqrt_len": mean_sqrt_len,
    "weightedmean": weighted_mean,
}


def _counts(cu_seqlens: Tensor, starts: Tensor | None) -> Tensor:
    length_B = cu_seqlens.diff()
    return length_B if starts is None else length_B - starts


def _sum(x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None) -> Tensor:
    """Sum each sequence's remaining tokens, float32 in and out."""
    if x_TC.is_cuda:  # index_add_ is atomic there: the order, and so the bits, would vary
        return _segment_reduce(x_TC, cu_seqlens, starts, "sum")
    segments = _segments(cu_seqlens, starts)
    segment_T = torch.repeat_interleave(segments, output_size=x_TC.shape[0])
    sums = x_TC.new_zeros((segments.shape[0], x_TC.shape[1])).index_add_(0, segment_T, x_TC)
    return sums if starts is None else sums[1::2]


def _segment_reduce(x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None, how: str) -> Tensor:
    segments = _segments(cu_seqlens, starts)
    reduced = torch.segment_reduce(x_TC, how, lengths=segments, axis=0, unsafe=True)
    return reduced if starts is None else reduced[1::2]


def _segments(cu_seqlens: Tensor, starts: Tensor | None) -> Tensor:
    """Lengths of the segments to reduce: [B], or [2 B] where what is left out lies in between."""
    length_B = cu_seqlens.diff().long()
    if starts is None:
        return length_B
    skipped_B = torch.minimum(starts.long(), length_B)
    return torch.stack((skipped_B, length_B - skipped_B), dim=1).flatten()


def _rows(x_TC: Tensor, index_B: Tensor, cu_seqlens: Tensor, starts: Tensor | None) -> Tensor:
    """Take one row per sequence; zeros where no token remains."""
    if x_TC.shape[0] == 0:
        return x_TC.new_zeros((index_B.shape[0], x_TC.shape[1]), dtype=torch.float32)
    row_BC = x_TC.index_select(0, index_B.clamp(0, x_TC.shape[0] - 1)).float()
    return row_BC.masked_fill((_counts(cu_seqlens, starts) <= 0).unsqueeze(1), 0.0)
