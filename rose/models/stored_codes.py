"""Writes and reads matrices as codes and scales in a checkpoint (`rose.models.quantized`).

Shape letters: I input channels, O output channels, G groups of inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from rose.kernels.quantization import GROUP, QuantizedWeight, num_groups, quantize
from rose.models.errors import CheckpointError
from rose.models.quantized import CODES, MINIMA, NIBBLES, SCALES
from rose.models.tensors import CheckpointTensors


@dataclass(frozen=True, slots=True)
class PowerOfRows:
    """The power of the inputs of some rows of a matrix, as `quantize` takes it."""

    start: int
    stop: int
    power: Tensor | None


def store(
    name: str, weight: Tensor, quantization: str, powers: Sequence[PowerOfRows] = ()
) -> dict[str, Tensor]:
    """Return the tensors that stand for a matrix, or for matrices of one shape [..., O, I].

    Rows are counted through all matrices; those without a power may be left out of `powers`.

    Of 8 bits: codes, int8 [O, I], and scales, bfloat16 [O, G]. Of 4 bits: nibbles, uint8 [O, I / 2]
    (of two neighbours the first is in the lower half), scales, and minima like scales. A matrix
    that cannot be cut like that stays as it is.
    """
    if quantization == "int4" and weight.shape[-1] % 2:
        return {name: weight}
    rounded = _quantize(weight.flatten(0, -2), quantization, powers)
    stored = {SCALES: rounded.scales.bfloat16()}
    if rounded.minima is None:
        stored[CODES] = rounded.codes
    else:
        codes = rounded.codes.to(torch.uint8)
        stored[NIBBLES] = codes[:, ::2] | codes[:, 1::2] << 4
        stored[MINIMA] = rounded.minima.bfloat16()
    return {name + kind: part.unflatten(0, weight.shape[:-1]) for kind, part in stored.items()}


def _quantize(
    weight_OI: Tensor, quantization: str, powers: Sequence[PowerOfRows]
) -> QuantizedWeight:
    ends = sorted({0, len(weight_OI), *(rows.start for rows in powers), *(r.stop for r in powers)})
    known = {rows.start: rows.power for rows in powers}
    parts = [
        quantize(weight_OI[start:stop], quantization, known.get(start))
        for start, stop in pairwise(ends)
    ]
    minima = [part.minima for part in parts if part.minima is not None]
    return QuantizedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        parts[0].bits,
        torch.cat(minima) if minima else None,
    )


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
    if codes.dtype not in allowed or codes.dim() < 2:
        kinds = " or ".join(str(kind).removeprefix("torch.") for kind in allowed)
        raise CheckpointError(
            f"tensor {names[0]!r}: rows of {kinds} are expected, found {codes.dim()} dimensions "
            f"of {codes.dtype}"
        )
    if codes.dtype == torch.uint8:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    for name, fact in zip(names[1:], facts, strict=True):
        _check_fact(name, fact, codes)
    codes_OI, facts_OG = codes.flatten(0, -2), [fact.flatten(0, -2).float() for fact in facts]
    return _meant(codes_OI, facts_OG, is_nibbles).view(codes.shape)


def _meant(codes_OI: Tensor, facts_OG: Sequence[Tensor], is_nibbles: bool) -> Tensor:
    scales_OG = facts_OG[0]
    if is_nibbles:
        return QuantizedWeight(codes_OI, scales_OG, 4, facts_OG[1]).dequantize()
    if codes_OI.dtype == torch.uint8:  # of version 1: code 8 means 0, and there are no minima
        return QuantizedWeight(codes_OI, scales_OG, 4, -8 * scales_OG).dequantize()
    return QuantizedWeight(codes_OI, scales_OG, 8).dequantize()


def _check_fact(name: str, fact: Tensor, codes: Tensor) -> None:
    groups = (*codes.shape[:-1], num_groups(codes.shape[-1]))
    if tuple(fact.shape) != groups or fact.dtype != torch.bfloat16:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(fact.shape)} of {fact.dtype}, the codes ask "
            f"for {list(groups)} of bfloat16: a number for every {GROUP} inputs"
        )
