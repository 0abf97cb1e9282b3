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
from rose.kernels.linear import LinearOp, TorchLinear, make_linear
from rose.models.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
        """Add a parameter that is filled from `parts`, joined along dimension 0.

        Raises:
            CheckpointError: no tensor can have the shape.
        """
        rows = sum(part.shape[0] for part in parts)
        try:
            empty = torch.empty(rows, *parts[0].shape[1:], device="meta")
        except (TypeError, RuntimeError) as error:  # sizes or bytes beyond 64 bits
            name, shape = parts[0]
            raise CheckpointError(
                f"tensor {name!r}: the config asks for {list(shape)}, which no tensor can have"
            ) from error
        self.register_parameter(attribute, nn.Parameter(empty, requires_grad=False))
        self.slots[attribute] = parts


def known_activation(name: str) -> str:
    """Return `name` if there is such an activation: a wrong one must not wait for a request.

    Raises:
        UnknownNameError: there is none.
    """
    ACTIVATIONS.load(name)
    return name


class Projection(WeightedModule):
    """act(x W^T + b), or act(gate) * up.

    Once it is prepared `op` computes it, and `weight` is None. Where `needs_bytes` is set, weights
    are rounded to 8 bits also where others are to 4.
    """

    weight: Tensor
    bias: Tensor | None
    needs_bytes = False

    def __init__(
        self,
        names: "Sequence[str]",
        inputs: int,
        outputs: "Sequence[int]",
        *,
        bias: bool,
        activation: str = "identity",
        gated: bool = False,
    ) -> None:
        """Declare one weight that is packed from the projections `names`, in this order."""
        super().__init__()
        self.activation, self.gated = known_activation(activation), gated
        self.op: LinearOp | None = None
        pairs = list(zip(names, outputs, strict=True))
        self.declare("weight", *(Part(f"{name}.weight", (size, inputs)) for name, size in pairs))
        if bias:
            self.declare("bias", *(Part(f"{name}.bias", (size,)) for name, size in pairs))
        else:
            self.register_parameter("bias", None)

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return [T, O]."""
        if self.op is not None:
            return self.op(x_TI)
        return TorchLinear(self.weight, self.bias, self.activation, self.gated)(x_TI)

    def share(self, weight: Tensor) -> None:
        """Use another module's weight instead of one of its own."""
        del self.slots["weight"]
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    @property
    def prepared(self) -> LinearOp:
        """What `prepare` returned."""
        assert self.op is not None
        return self.op

    def prepare(self, quantization: str | None = None, power_I: Tensor | None = None) -> LinearOp:
        """Hand the weight over to `op`, which may hold it in another form, so there is one copy."""
        if quantization == "int4" and self.needs_bytes:
            quantization = "int8"
        op = make_linear(
            self.weight,
            self.bias,
            activation=self.activation,
            gated=self.gated,
            quantization=quantization,
            power_I=power_I,
        )
        self.op = op
        self.register_parameter("weight", None)
        return op


class Linear(Projection):
    """A projection, filled from `name`.weight and `name`.bias."""

    def __init__(
        self, name: str, inputs: int, outputs: int, *, bias: bool, activation: str = "identity"
    ) -> None:
        """Declare the weight [outputs, inputs] and, if asked, the bias [outputs]."""
        super().__init__([name], inputs, [outputs], bias=bias, activation=activation)


class PackedLinear(Projection):
    """Several projections of the same input as one matrix product (qkv)."""

    def __init__(
        self, names: "Sequence[str]", inputs: int, outputs: "Sequence[int]", *, bias: bool
    ) -> None:
        """Declare the weight [sum of outputs, inputs] and, if asked, the bias."""
        super().__init__(names, inputs, outputs, bias=bias)
        self.outputs = tuple(outputs)

    def split(self, x_TI: Tensor) -> tuple[Tensor, ...]:
        """Return each projection's [T, O] as a view."""
        return self(x_TI).split(self.outputs, dim=-1)


class GatedLinear(Projection):
    """act(gate(x)) * up(x), with gate and up as one matrix product."""

    def __init__(
        self, gate: str, up: str, inputs: int, outputs: int, *, bias: bool, activation: str
    ) -> None:
        """Declare the weight [2 outputs, inputs] and, if asked, the bias [2 outputs]."""
        super().__init__(
            [gate, up], inputs, [outputs] * 2, bias=bias, activation=activation, gated=True
        )


class Embedding(WeightedModule):
    """A table of vectors, filled from `name`.weight.

    Once it is tied to a prepared projection `op` looks rows up, and `weight` is None.
    """

    weight: Tensor

    def __init__(self, name: str, rows: int, channels: int) -> None:
        """Declare the table [rows, channels]."""
        super().__init__()
        self.declare("weight", Part(f"{name}.weight", (rows, channels)))
        self.op: LinearOp | None = None

    def forward(self, ids_T: Tensor) -> Tensor:
        """Return the rows of `ids_T`: [T, C]."""
        if self.op is not None:
            return self.op.rows(ids_T)
        return F.embedding(ids_T, self.weight)

    def share(self, op: LinearOp) -> None:
        """Look rows up in the weight of a prepared projection."""
        self.op = op
        self.register_parameter("weight", None)


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
    offset = 0.0  # of the weight

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


class FusableLayer(nn.Module):
    """A layer that one kernel may compute as a whole, once its projections are prepared."""

    def fuse(self) -> None:
        """Look for that kernel."""
        raise NotImplementedError


def prepare(
    model: nn.Module,
    quantization: str | None = None,
    power: "Mapping[nn.Module, Tensor] | None" = None,
) -> None:
    """Bring the weights of all projections into the form that the device computes fastest with.

    Args:
        model: filled with weights.
        quantization: what to round them to, as in `rose.kernels.linear.make_linear`; tables that
            are tied to a projection follow it.
        power: of projections, the mean squares of their inputs, float32 [I], where they are known.

    Raises:
        ValueError: the quantization is unknown, or cannot be computed here.
    """
    ops: dict[int, LinearOp] = {}
    for module in model.modules():
        if isinstance(module, Projection) and module.op is None:
            address = module.weight.data_ptr()
            ops[address] = module.prepare(quantization, (power or {}).get(module))
    for module in model.modules():
        if isinstance(module, Embedding) and module.op is None:
            tied = ops.get(module.weight.data_ptr())
            if tied is not None:
                module.share(tied)
    for module in model.modules():
        if isinstance(module, FusableLayer):
            module.fuse()
