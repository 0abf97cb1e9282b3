"""Activation functions by the names that checkpoints' configs use.

Shape letters: T tokens, I intermediate size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.dispatch import operation
from rose.kernels.registry import Registry

Activation = Callable[[Tensor], Tensor]


def gelu(x: Tensor) -> Tensor:
    """Exact GELU: x times the normal distribution function of x."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by the tanh approximation; configs have three names for it."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """GELU by the sigmoid approximation x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return F.relu(x)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), also called swish."""
    return F.silu(x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(x)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function."""
    return torch.sigmoid(x)


def identity(x: Tensor) -> Tensor:
    """Return x itself."""
    return x


ACTIVATIONS: Registry[Activation] = Registry(
    "activation",
    {
        name: f"rose.kernels.activation:{function}"
        for name, function in {
            "gelu": "gelu",
            "gelu_fast": "gelu_tanh",
            "gelu_new": "gelu_tanh",
            "gelu_pytorch_tanh": "gelu_tanh",
            "identity": "identity",
            "linear": "identity",
            "quick_gelu": "quick_gelu",
            "relu": "relu",
            "sigmoid": "sigmoid",
            "silu": "silu",
            "swish": "silu",
            "tanh": "tanh",
        }.items()
    },
)


def activate(x: Tensor, name: str) -> Tensor:
    """Apply the activation `name` to every element.

    Raises:
        UnknownNameError: no activation has this name.
    """
    return ACTIVATIONS.load(name)(x)


@operation
def gated(x_T2I: Tensor, name: str) -> Tensor:
    """Return act(gate) * up, where gate and up are the first and the second half of the channels.

    Args:
        x_T2I: [..., 2 I], the output of a fused gate and up projection.
        name: the activation's name, one of `ACTIVATIONS`.

    Returns:
        [..., I] in the input's dtype.

    Raises:
        UnknownNameError: no activation has this name.
    """
    gate_TI, up_TI = x_T2I.chunk(2, dim=-1)
    return activate(gate_TI, name) * up_TI
