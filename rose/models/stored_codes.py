"""Writes and reads matrices as codes and scales in a checkpoint (`rose.models.quantized`).

Shape letters: I input channels, O output channels, G groups of inputs.
"""

import torch
from torch import Tensor

from rose.kernels.quantization import BITS, QuantizedWeight, num_groups, quantize
from rose.models.errors import CheckpointError
from rose.models.quantized import CODES, SCALES
from rose.models.tensors import CheckpointTensors


def store(name: str, weight_OI: Tensor, quantization: str) -> dict[str, Tensor]:
    """Return the tensors that stand for a matrix.

    Codes are int8 [O, I], or, of 4 bits, uint8 [O, I / 2]: of two neighbours the first is in the
    lower half, and 8 is added to each. Scales are bfloat16 [O, G]. A matrix that cannot be cut like
    that stays as it is.
    """
    if BITS[quantization] == 4 and weight_OI.shape[1] % 2:
        return {name: weight_OI}
    rounded = quantize(weight_OI, quantization)
    codes = rounded.codes
    if rounded.bits == 4:
        shifted = (codes + 8).to(torch.uint8)
        codes = shifted[:, ::2] | shifted[:, 1::2] << 4
    return {name + CODES: codes.contiguous(), name + SCALES: rounded.scales.bfloat16()}


def combine_codes(tensors: CheckpointTensors) -> None:
    """Let every matrix that is stored as codes be found under its own name, in float32.

    Raises:
        CheckpointError: scales are missing. Codes of a wrong type are found when they are read.
    """
    for stored in [name for name in tensors if name.endswith(CODES)]:
        name = stored.removesuffix(CODES)

        def read(codes: Tensor, scales: Tensor, name: str = name) -> Tensor:
            return _read(name, codes, scales)

        tensors.combine(name, (stored, name + SCALES), read)


def _read(name: str, codes: Tensor, scales_OG: Tensor) -> Tensor:
    bits = {torch.int8: 8, torch.uint8: 4}.get(codes.dtype)
    if bits is None or scales_OG.dtype != torch.bfloat16 or codes.dim() != 2:
        raise CheckpointError(
            f"tensor {name + CODES!r}: int8 or uint8 with scales of bfloat16 is expected, "
            f"found {codes.dim()} dimensions of {codes.dtype} with {scales_OG.dtype}"
        )
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).to(torch.int8) - 8
    groups = (codes.shape[0], num_groups(codes.shape[1]))
    if tuple(scales_OG.shape) != groups:
        raise CheckpointError(
            f"tensor {name + SCALES!r} has shape {list(scales_OG.shape)}, the codes ask for "
            f"{list(groups)}"
        )
    return QuantizedWeight(codes, scales_OG.float(), bits).dequantize()
