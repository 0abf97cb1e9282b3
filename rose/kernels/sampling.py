"""Draws tokens at random: temperature, top_k, top_p and min_p over logits.

A token is the winner of an exponential race: of all tokens, the one with the least noise /
probability, where the noise is a hash of (key of the row, token id) made an exponential variable.
That draws each token with its probability. Where the same logits come out a little different, as
they do in batches of other shapes, it is the same token unless the race is as close as that.
(Inverting the cumulative distribution has no such margin: all tokens lie side by side in it, so
many small differences together pick another token every few hundred draws.)

A row depends on its own logits and knobs alone, never on the other rows. Softmax works row by row.
Where probabilities are summed, for top_p, they are integers (units of 2**-44) held in float64,
whose sums are exact, hence the same in any order of addition. Tokens are cut by value: those as
likely as the last one kept stay too.

Shape letters: S rows, V vocabulary, N most likely tokens, 1 a column to broadcast.
"""

from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**44  # probability 1 as an integer; sums over any vocabulary stay below 2**53
BLOCK = 1 << 18  # logits to work on at a time on a CPU, so that they stay in its cache
FEW = 512  # how many of the most likely tokens to look at before a whole row is sorted

# Odd factors of 32 bits, as signed integers. The first two are those of the "lowbias32" hash.
_FACTORS = (0x21F0AAAD, 0x735A2D97, 0x2C1B3C6D, 0x297A2D39)
# Just below 2**-31, so that float32 values of 31 bits become numbers below 1.
_BELOW_ONE = float(np.nextafter(np.float32(2.0**-31), np.float32(0)))


class Cut(Enum):
    """How rows are cut. It follows from a row's knobs, so that neighbours cannot change it."""

    NONE = auto()
    FLOOR = auto()  # by min_p alone
    FEW = auto()  # top_k of at most FEW, which is less than the vocabulary
    ANY = auto()


class Knobs(NamedTuple):
    """Parameters of rows, float64 [S, 1] each. Rows without top_k have the vocabulary's size."""

    key_low: Tensor  # the halves of a random key, as signed integers of 32 bits
    key_high: Tensor
    temperature: Tensor  # above 0
    top_k: Tensor  # at least 1
    top_p: Tensor
    min_p: Tensor

    def at(self, rows: Tensor | slice) -> "Knobs":
        """Those of the given rows."""
        return Knobs(*(knob[rows] for knob in self))


def draw(logits_SV: Tensor, knobs: Knobs, cut: Cut) -> Tensor:
    """Draw a token for each row.

    Args:
        logits_SV: float32.
        knobs: parameters of the rows.
        cut: how all of these rows are cut.

    Returns:
        int64 [S]; some valid id for a row whose logits are not finite or all -inf.
    """
    hashes_1V = _hashes(logits_SV.shape[-1], logits_SV.device)
    if logits_SV.is_cuda:
        return _draw(logits_SV, hashes_1V, knobs, cut)
    size = max(1, BLOCK // logits_SV.shape[-1])
    blocks = [slice(start, start + size) for start in range(0, len(logits_SV), size)]
    way = _draw_among_few if cut is Cut.FEW else _draw
    return torch.cat([way(logits_SV[block], hashes_1V, knobs.at(block), cut) for block in blocks])


def _draw_among_few(logits_SV: Tensor, hashes_1V: Tensor, knobs: Knobs, _: Cut) -> Tensor:
    """Leave all but the most likely tokens out of the work, which is most of it.

    Rows where more tokens than that are as likely as the k-th take the long way.
    """
    largest_SN, ids_SN = logits_SV.topk(FEW, dim=-1)
    found_S = _draw(largest_SN, hashes_1V[0][ids_SN], knobs, Cut.ANY)
    drawn_S = ids_SN.gather(1, found_S[:, None])[:, 0]
    kth_S1 = largest_SN.gather(1, knobs.top_k.long() - 1)
    rest = (~(largest_SN[:, -1:] < kth_S1))[:, 0].nonzero()[:, 0]
    if len(rest):
        drawn_S[rest] = _draw(logits_SV[rest], hashes_1V, knobs.at(rest), Cut.ANY)
    return drawn_S


def _draw(logits_SV: Tensor, hashes_SV: Tensor, knobs: Knobs, cut: Cut) -> Tensor:
    probs_SV = _probabilities(logits_SV, knobs.temperature)
    if cut is not Cut.NONE:
        floor_S1 = knobs.min_p.float() * probs_SV.amax(-1, keepdim=True)
        kept_SV = probs_SV >= floor_S1
        if cut is not Cut.FLOOR:
            weights_SV = _weights(probs_SV)
            kept_SV &= weights_SV >= cutoff(weights_SV, knobs, cut)
        probs_SV *= kept_SV
    # The noise is below 0: the least noise / probability is at the least probability / noise.
    return (probs_SV / _noise(hashes_SV, knobs)).argmin(-1)


def _probabilities(logits_SV: Tensor, temperature_S1: Tensor) -> Tensor:
    """The shift by the maximum comes first: it puts the likeliest at 0 for any temperature."""
    scaled_SV = logits_SV - logits_SV.amax(-1, keepdim=True)
    scaled_SV /= temperature_S1.float()
    return scaled_SV.softmax(-1)


def _weights(probs_SV: Tensor) -> Tensor:
    """Probabilities in integer units of 1 / UNIT, float64 [S, V]."""
    return probs_SV.double().mul_(UNIT).floor_()


def _noise(hashes_SV: Tensor, knobs: Knobs) -> Tensor:
    """Logarithms of numbers above 0 and below 1, float32 [S, V], from hashes and keys."""
    x_SV = hashes_SV ^ knobs.key_low.to(torch.int32)
    _mix(x_SV, _FACTORS[2], 15)
    x_SV ^= knobs.key_high.to(torch.int32)
    _mix(x_SV, _FACTORS[3], 15)
    x_SV &= 0x7FFFFFFF
    x_SV |= 1
    return x_SV.float().mul_(-_BELOW_ONE).log1p_()


@lru_cache(maxsize=8)
def _hashes(vocab_size: int, device: torch.device) -> Tensor:
    """A hash of each token id, int32 [1, V]."""
    x_V = torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device)
    _mix(x_V, _FACTORS[0], 15)
    _mix(x_V, _FACTORS[1], 15)
    return x_V[None]


def _mix(x: Tensor, factor: int, shift: int) -> None:
    """Multiply modulo 2**32, then fold the upper bits into the lower ones."""
    x *= factor
    upper = x >> shift
    upper &= (1 << (32 - shift)) - 1  # the shift of a signed number repeats its sign
    x ^= upper


def cutoff(weights_SV: Tensor, knobs: Knobs, cut: Cut) -> Tensor:
    """The least weight [S, 1] that top_k, and then top_p among those, keep.

    Sorting a row costs far more than finding its largest few, so first it looks at few. Whether
    they are enough is known beforehand from top_k; for top_p it takes a look at the result, which
    is free on a CPU only.
    """
    width = weights_SV.shape[-1]
    if cut is Cut.FEW:
        return _cutoff_among(FEW, weights_SV, knobs)[0]
    if width <= FEW or weights_SV.is_cuda:
        return _cutoff_among(width, weights_SV, knobs)[0]
    cutoff_S1, true_S1 = _cutoff_among(FEW, weights_SV, knobs)
    rest = (~true_S1)[:, 0].nonzero()[:, 0]
    if len(rest):
        cutoff_S1[rest] = _cutoff_among(width, weights_SV[rest], knobs.at(rest))[0]
    return cutoff_S1


def _cutoff_among(count: int, weights_SV: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    """The cutoff seen from the `count` largest weights, and whether it is the true one."""
    largest_SN = _largest(weights_SV, count)
    unlimited_S1 = knobs.top_k >= weights_SV.shape[-1]
    place_S1 = knobs.top_k.clamp(max=count).long() - 1
    kth_S1 = largest_SN.gather(1, place_S1).masked_fill(unlimited_S1, 0.0)
    # top_p counts from what top_k keeps, all tokens as likely as the k-th included.
    kept_S1 = (weights_SV * (weights_SV >= kth_S1)).sum(-1, keepdim=True)
    goal_S1 = knobs.top_p * kept_S1
    sums_SN = largest_SN.cumsum(-1)
    needed_S1 = (sums_SN - largest_SN < goal_S1).sum(-1, keepdim=True).clamp(min=1)
    pth_S1 = largest_SN.gather(1, needed_S1 - 1)
    true_S1 = (knobs.top_k <= count) | (unlimited_S1 & (sums_SN[:, -1:] >= goal_S1))
    return torch.maximum(kth_S1, pth_S1), true_S1


def _largest(weights_SV: Tensor, count: int) -> Tensor:
    """The `count` largest weights of each row, largest first.

    A weight has the 24 significant bits of the float32 that it was made from, so float32 holds it.
    """
    if count < weights_SV.shape[-1]:
        return weights_SV.topk(count, dim=-1).values
    narrow_SV = weights_SV.float()
    if narrow_SV.is_cuda:
        return narrow_SV.sort(dim=-1, descending=True).values.double()
    ascending = torch.from_numpy(np.sort(narrow_SV.numpy(), axis=-1))  # faster than torch's
    return ascending.flip(-1).double()
