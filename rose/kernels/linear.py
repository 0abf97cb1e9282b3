"""Linear layers: y = act(x W^T + b), or act(gate) * up where one matrix holds gate and up.

`make_linear` brings weights into the form that the device computes fastest with: on a CPU, float32
weights become panels for the compiled kernels (`rose.kernels.cpu`), everywhere else they stay as
they are and torch multiplies.

Shape letters: T tokens, I input channels, O output channels (2 O rows of weights where gated).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.activation import activate, gated
from rose.kernels.cpu import load_library
from rose.kernels.cpu.gemm import ACTIVATION_NUMBERS, PackedMatrix
from rose.kernels.quantization import quantize


class LinearOp(Protocol):
    """A linear layer that holds its weights."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, O]."""
        ...

    def rows(self, ids_T: Tensor) -> Tensor:
        """Return rows of the weight matrix, [T, I]: the embedding that it is tied to."""
        ...


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """The layer by torch ops, in any dtype and on any device."""

    weight: Tensor
    bias: Tensor | None
    activation: str = "identity"
    gated: bool = False

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, O]."""
        return finish(F.linear(x_TI, self.weight, self.bias), self.activation, self.gated)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Return rows of the weight matrix, [T, I]."""
        return F.embedding(ids_T, self.weight)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The layer by the CPU kernels, with an activation that they do not know done by torch."""

    matrix: PackedMatrix
    activation: str
    gated: bool

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return [T, O]."""
        return finish(self.matrix(x_TI), self.activation, self.gated)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Return rows of the weight matrix, [T, I]."""
        return self.matrix.rows(ids_T)


def finish(x_TO: Tensor, activation: str, is_gated: bool) -> Tensor:
    """Apply what follows the matrix product."""
    return gated(x_TO, activation) if is_gated else activate(x_TO, activation)


def make_linear(
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    activation: str = "identity",
    gated: bool = False,
    quantization: str | None = None,
    power_I: Tensor | None = None,
) -> LinearOp:
    """Make the fastest layer for these weights.

    Args:
        weight_OI: [O, I], where gated [2 O, I] with all gates first. A packed layer keeps a copy
            and not the tensor, so that its memory can be given back.
        bias_O: [O], where gated [2 O], or None.
        activation: one of `rose.kernels.activation.ACTIVATIONS`.
        gated: whether results are act(gate) * up.
        quantization: None keeps the weights as they are; a name of
            `rose.kernels.quantization.BITS` rounds them.
        power_I: mean squares of the inputs, for `rose.kernels.quantization.quantize`.

    Raises:
        ValueError: another quantization, or one that cannot be computed here.
    """
    is_plain = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32
    library = load_library() if is_plain else None
    if library is None:
        if quantization is not None:
            raise ValueError(_cannot_quantize(quantization, weight_OI, is_plain))
        return TorchLinear(weight_OI, bias_O, activation, gated)
    weight_OI = weight_OI.contiguous()
    weight = weight_OI if quantization is None else quantize(weight_OI, quantization, power_I)
    if activation in ACTIVATION_NUMBERS:
        return PackedMatrix(library, weight, bias_O, activation=activation, gated=gated)
    return PackedLinear(PackedMatrix(library, weight, bias_O), activation, gated)


def _cannot_quantize(quantization: str, weight: Tensor, is_plain: bool) -> str:
    if not is_plain:
        kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
        return f"quantization {quantization!r} needs dtype float32 on a CPU, and this is {kind}"
    return (
        f"quantization {quantization!r} needs the compiled CPU kernels, which are off here or "
        "cannot be built: is there a C++ compiler, and is ROSE_CPU_KERNELS not off?"
    )
