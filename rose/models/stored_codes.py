"""Writes and reads matrices as codes and scales in a checkpoint (`rose.models.quantized`).

Shape letters: I input channels, O output channels, G groups of inputs.
"""

from functools import partial

import torch
from torch import Tensor

from rose.kernels.quantization import GROUP, QuantizedWeight, num_groups, quantize
from rose.models.errors import CheckpointError
from rose.models.quantized import CODES, MINIMA, NIBBLES, SCALES
from rose.models.tensors import CheckpointTensors


def store(
    name: str, weight_OI: Tensor, quantization: str, power_I: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the tensors that stand for a matrix; `power_I` is as for `quantize`.

    Of 8 bits: codes, int8 [O, I], and scales, bfloat16 [O, G]. Of 4 bits: nibbles, uint8 [O, I / 2]
    (of two neighbours the first is in the lower half), scales, and minima like scales. A matrix
    that cannot be cut like that stays as it is.
    """
    if quantization == "int4" and weight_OI.shape[1] % 2:
        return {name: weight_OI}
    rounded = quantize(weight_OI, quantization, power_I)
    scales = {name + SCALES: rounded.scales.bfloat16()}
    if rounded.minima is None:
        return {name + CODES: rounded.codes, **scales}
    codes = rounded.codes.to(torch.uint8)
    nibbles = codes[:, ::2] | codes[:, 1::2] << 4
    return {name + NIBBLES: nibbles, **scales, name + MINIMA: rounded.minima.bfloat16()}


def combine_codes(tensors: CheckpointTensors) -> None:
    """Let every matrix that is stored as codes be found under its own name, in float32.

    Raises:
        CheckpointError: scales are missing. Codes of a wrong type are found when they are read.
    """
    for suffix, others in ((CODES, (SCALES,)), (NIBBLES, (SCALES, MINIMA))):
        for stored in [name for name in tensors if name.endswith(suffix)]:
            name = stored.removesuffix(suffix)
            parts = (stored, *(name + other for other in others))
            tensors.combine(name, parts, partial(_read, parts))


def _read(names: tuple[str, ...], codes: Tensor, *facts: Tensor) -> Tensor:
    is_nibbles = names[0].endswith(NIBBLES)
    allowed = (torch.uint8,) if is_nibbles else (torch.int8, torch.uint8)
    if codes.dtype not in allowed or codes.dim() != 2:
        kinds = " or ".join(str(kind).removeprefix("torch.") for kind in allowed)
        raise CheckpointError(
            f"tensor {names[0]!r}: two dimensions of {kinds} are expected, found "
            f"{codes.dim()} of {codes.dtype}"
        )
    if codes.dtype == torch.uint8:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    for name, fact_OG in zip(names[1:], facts, strict=True):
        _check_fact(name, fact_OG, codes)
    scales_OG = facts[0].float()
    if is_nibbles:
        return QuantizedWeight(codes, scales_OG, 4, facts[1].float()).dequantize()
    if codes.dtype == torch.uint8:  # of version 1: code 8 means 0, and there are no minima
        return QuantizedWeight(codes, scales_OG, 4, -8 * scales_OG).dequantize()
    return QuantizedWeight(codes, scales_OG, 8).dequantize()


def _check_fact(name: str, fact_OG: Tensor, codes_OI: Tensor) -> None:
    groups = (codes_OI.shape[0], num_groups(codes_OI.shape[1]))
    if tuple(fact_OG.shape) != groups or fact_OG.dtype != torch.bfloat16:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(fact_OG.shape)} of {fact_OG.dtype}, the codes ask "
            f"for {list(groups)} of bfloat16: a number for every {GROUP} inputs"
        )
