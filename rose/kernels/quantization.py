"""Weights as whole numbers of 8 or 4 bits, with a scale for every 32 inputs of an output.

`quantize` makes them. `quantized_linear` says what a layer with such weights computes, in torch
ops: the kernels of `rose.kernels.cpu` compute the same, and faster. Its inputs are encoded too,
each group of a row in 256 steps from its least number to its greatest.

Shape letters: T tokens, I input channels, O output channels, G groups of inputs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # inputs
BITS = {"int8": 8, "int4": 4}  # by the name of a quantization
_ROWS = 4096  # of a matrix at a time: what is computed on the way takes several times its memory
# Scales to try, as shares of the one that fits a group's largest weight: with few steps, a finer
# one that cuts off the largest may fit the others better.
_SHARES = {8: (1.0,), 4: tuple(1.0 - 0.04 * i for i in range(10))}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix: int8 codes [O, I], and float32 scales [O, G] that bfloat16 holds exactly."""

    codes: Tensor
    scales: Tensor
    bits: int

    def dequantize(self) -> Tensor:
        """Return what the codes mean: float32 [O, I]."""
        scales_OI = self.scales.repeat_interleave(GROUP, 1)[:, : self.codes.shape[1]]
        return self.codes * scales_OI


def num_groups(inputs: int) -> int:
    """Return the groups of so many inputs; the last may be smaller."""
    return -(-inputs // GROUP)


def quantize(weight_OI: Tensor, quantization: str) -> QuantizedWeight:
    """Round a matrix to the nearest codes, with the scales that lose least.

    Args:
        weight_OI: of floating point, [O, I].
        quantization: one of `BITS`.

    Raises:
        ValueError: another quantization.
    """
    if quantization not in BITS:
        raise ValueError(f"quantization {quantization!r} is unknown. Known: {', '.join(BITS)}.")
    bits = BITS[quantization]
    parts = [_quantize_rows(rows, bits) for rows in weight_OI.split(_ROWS)]
    codes_OI = torch.cat([codes for codes, _ in parts])
    return QuantizedWeight(codes_OI, torch.cat([scales for _, scales in parts]), bits)


def _quantize_rows(weight_OI: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    groups_OGK = _in_groups(weight_OI.float())
    largest_OG = groups_OGK.abs().amax(-1)
    if bits == 4:  # the range of codes is larger below zero: let the largest weight lie there
        index_OG1 = groups_OGK.abs().argmax(-1, keepdim=True)
        largest_OG = -groups_OGK.gather(-1, index_OG1).squeeze(-1)
    top = 127 if bits == 8 else 8
    codes_OGK, scales_OG, error_OG = None, largest_OG, torch.full_like(largest_OG, torch.inf)
    for share in _SHARES[bits]:
        tried_OG = (largest_OG * (share / top)).bfloat16().float()
        tried_OGK = _codes(groups_OGK, tried_OG, bits)
        lost_OG = (tried_OGK * tried_OG[..., None] - groups_OGK).square().sum(-1)
        if codes_OGK is None:
            codes_OGK, scales_OG, error_OG = tried_OGK, tried_OG, lost_OG
            continue
        better_OG = lost_OG < error_OG
        codes_OGK = torch.where(better_OG[..., None], tried_OGK, codes_OGK)
        scales_OG = torch.where(better_OG, tried_OG, scales_OG)
        error_OG = torch.where(better_OG, lost_OG, error_OG)
    assert codes_OGK is not None
    return codes_OGK.flatten(1)[:, : weight_OI.shape[1]].to(torch.int8), scales_OG


def _codes(groups_OGK: Tensor, scales_OG: Tensor, bits: int) -> Tensor:
    """Return the nearest codes; a group whose scale is 0 has zeros."""
    divisor_OG1 = torch.where(scales_OG == 0, 1.0, scales_OG)[..., None]
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    return (groups_OGK / divisor_OG1).round().clamp(low, high).nan_to_num(0.0)


def _in_groups(x: Tensor) -> Tensor:
    """Cut the last dimension into groups, filled up with zeros: [..., G, GROUP]."""
    return F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def encode_inputs(x_TI: Tensor) -> Tensor:
    """Return what is left of inputs once each group of a row is rounded to 256 steps: [T, I]."""
    inputs = x_TI.shape[1]
    last = inputs % GROUP or GROUP
    parts = [x_TI[:, : inputs - last].unflatten(1, (-1, GROUP)), x_TI[:, None, inputs - last :]]
    return torch.cat([_round_to_steps(part).flatten(1) for part in parts], 1)


def _round_to_steps(x_TGK: Tensor) -> Tensor:
    low_TG1, high_TG1 = x_TGK.aminmax(dim=-1, keepdim=True)
    step_TG1 = (high_TG1 - low_TG1) / 255
    divisor_TG1 = torch.where(step_TG1 == 0, 1.0, step_TG1)
    return ((x_TGK - low_TG1) / divisor_TG1).round() * step_TG1 + low_TG1


def quantized_linear(x_TI: Tensor, weight: QuantizedWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b for encoded inputs: [T, O] of the dtype of x."""
    bias_O = None if bias_O is None else bias_O.to(x_TI.dtype)
    return F.linear(encode_inputs(x_TI), weight.dequantize().to(x_TI.dtype), bias_O)
