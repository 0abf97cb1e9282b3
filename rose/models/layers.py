"""Layers that architectures are built from. Each declares the checkpoint tensors that fill it.

Parameters are born on the meta device, without memory; `rose.models.weights` fills them by name.
Shape letters: T tokens, C channels, I input channels, O output channels.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.kernels import norm
from rose.kernels.activation import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence


class Part(NamedTuple):
    """A checkpoint tensor: its name (without the checkpoint's prefix) and its shape."""

    name: str
    shape: tuple[int, ...]


class WeightedModule(nn.Module):
    """A module whose parameters say which checkpoint tensors they are made of.

    `slots` maps a parameter's attribute to its parts, which are joined along dimension 0.
    """

    def __init__(self) -> None:
        """Start without parameters."""
        super().__init__()
        self.slots: dict[str, tuple[Part, ...]] = {}

    def declare(self, attribute: str, *parts: Part) -> None:
        """Add a parameter that is filled from `parts`, joined along dimension 0."""
        rows = sum(part.shape[0] for part in parts)
        empty = torch.empty(rows, *parts[0].shape[1:], device="meta")
        self.register_parameter(attribute, nn.Parameter(empty, requires_grad=False))
        self.slots[attribute] = parts

    def share(self, weight: Tensor) -> None:
        """Use another module's weight instead of one of its own."""
        del self.slots["weight"]
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


def known_activation(name: str) -> str:
    """Return `name` if there is such an activation: a wrong one must not wait for a request.

    Raises:
        UnknownNameError: there is none.
    """
    ACTIVATIONS.load(name)
    return name


class Linear(WeightedModule):
    """x W^T + b, filled from `name`.weight and `name`.bias."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, name: str, inputs: int, outputs: int, *, bias: bool) -> None:
        """Declare the weight [outputs, inputs] and, if asked, the bias [outputs]."""
        super().__init__()
        self.declare("weight", Part(f"{name}.weight", (outputs, inputs)))
        if bias:
            self.declare("bias", Part(f"{name}.bias", (outputs,)))
        else:
            self.register_parameter("bias", None)

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return [T, O]."""
        return F.linear(x_TI, self.weight, self.bias)


class PackedLinear(WeightedModule):
    """Several projections of the same input as one matrix product (qkv, gate and up)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, names: "Sequence[str]", inputs: int, outputs: "Sequence[int]", *, bias: bool
    ) -> None:
        """Declare one weight that is packed from the projections `names`, in this order."""
        super().__init__()
        self.outputs = tuple(outputs)
        pairs = list(zip(names, outputs, strict=True))
        self.declare("weight", *(Part(f"{name}.weight", (size, inputs)) for name, size in pairs))
        if bias:
            self.declare("bias", *(Part(f"{name}.bias", (size,)) for name, size in pairs))
        else:
            self.register_parameter("bias", None)

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return [T, sum of outputs]."""
        return F.linear(x_TI, self.weight, self.bias)

    def split(self, x_TI: Tensor) -> tuple[Tensor, ...]:
        """Return each projection's [T, O] as a view."""
        return self(x_TI).split(self.outputs, dim=-1)


class Embedding(WeightedModule):
    """A table of vectors, filled from `name`.weight."""

    weight: Tensor

    def __init__(self, name: str, rows: int, channels: int) -> None:
        """Declare the table [rows, channels]."""
        super().__init__()
        self.declare("weight", Part(f"{name}.weight", (rows, channels)))

    def forward(self, ids_T: Tensor) -> Tensor:
        """Return the rows of `ids_T`: [T, C]."""
        return F.embedding(ids_T, self.weight)


class LayerNorm(WeightedModule):
    """Layer norm, filled from `name`.weight and `name`.bias."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, name: str, channels: int, eps: float, *, bias: bool = True) -> None:
        """Declare weight and bias [channels]."""
        super().__init__()
        self.eps = eps
        self.declare("weight", Part(f"{name}.weight", (channels,)))
        if bias:
            self.declare("bias", Part(f"{name}.bias", (channels,)))
        else:
            self.register_parameter("bias", None)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return the normed `x_TC`."""
        return norm.layer_norm(x_TC, self.weight, self.bias, self.eps)

    def add(self, x_TC: Tensor, residual_TC: Tensor) -> Tensor:
        """Return the normed sum of both."""
        return norm.add_layer_norm(x_TC, residual_TC, self.weight, self.bias, self.eps)


class RMSNorm(WeightedModule):
    """RMS norm, filled from `name`.weight."""

    weight: Tensor

    def __init__(self, name: str, channels: int, eps: float) -> None:
        """Declare the weight [channels]."""
        super().__init__()
        self.eps = eps
        self.declare("weight", Part(f"{name}.weight", (channels,)))

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return the normed `x_TC`."""
        return norm.rms_norm(x_TC, self.weight, self.eps)

    def add(self, x_TC: Tensor, residual_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed sum of both, and the sum: the next residual."""
        return norm.add_rms_norm(x_TC, residual_TC, self.weight, self.eps)
