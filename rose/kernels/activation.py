"""Activation functions by the names that checkpoints' configs use.

Shape letters: T tokens, I intermediate size.
"""

import math
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
    """GELU by the tanh approximation; configs have several names for it."""
    return F.gelu(x, approximate="tanh")


def gelu_10(x: Tensor) -> Tensor:
    """Exact GELU, at most 10."""
    return F.gelu(x).clamp(-10, 10)


def quick_gelu(x: Tensor) -> Tensor:
    """GELU by the sigmoid approximation x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return F.relu(x)


def relu2(x: Tensor) -> Tensor:
    """Return the square of max(x, 0)."""
    return F.relu(x).square()


def laplace(x: Tensor) -> Tensor:
    """Cumulative distribution function near relu2 (Ma et al., 2022, MEGA)."""
    return 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0))))


def sqrtsoftplus(x: Tensor) -> Tensor:
    """Return the square root of log(1 + exp(x))."""
    return F.softplus(x).sqrt()


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


# Those that are torch's own, with its defaults.
_TORCH = (
    "celu",
    "elu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "relu6",
    "rrelu",
    "selu",
    "softplus",
    "softshrink",
    "softsign",
    "tanhshrink",
)

ACTIVATIONS: Registry[Activation] = Registry(
    "activation",
    {
        name: f"rose.kernels.activation:{function}"
        for name, function in {
            "gelu": "gelu",
            "gelu_10": "gelu_10",
            "gelu_accurate": "gelu_tanh",
            "gelu_fast": "gelu_tanh",
            "gelu_new": "gelu_tanh",
            "gelu_python": "gelu",
            "gelu_python_tanh": "gelu_tanh",
            "gelu_pytorch_tanh": "gelu_tanh",
            "identity": "identity",
            "laplace": "laplace",
            "linear": "identity",
            "quick_gelu": "quick_gelu",
            "relu": "relu",
            "relu2": "relu2",
            "sigmoid": "sigmoid",
            "silu": "silu",
            "sqrtsoftplus": "sqrtsoftplus",
            "swish": "silu",
            "tanh": "tanh",
        }.items()
    }
    | {name: f"torch.nn.functional:{name}" for name in _TORCH},
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
