"""What comes after the backbone: pooling and the recipe's modules, all in float32.

Shape letters: T tokens, B sequences, C channels, I input channels, O output channels.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rose.kernels.activation import activate
from rose.kernels.normalize import l2_normalize
from rose.kernels.pooling import POOLINGS
from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError
from rose.models.layers import LayerNorm, Linear
from rose.models.recipe_modules import DenseModule, LayerNormModule, NormalizeModule
from rose.models.tensors import open_tensors
from rose.models.weights import NamedTensors, fill

if TYPE_CHECKING:
    from rose.models.recipe import Recipe
    from rose.models.recipe_modules import PoolingModule, VectorModule

_LAYER_NORM_EPS = 1e-5  # torch.nn.LayerNorm's default, which the module uses


class Pooler(nn.Module):
    """One vector per sequence; several modes are joined."""

    def __init__(self, module: "PoolingModule") -> None:
        """Pool by the modes of `module`, in its order."""
        super().__init__()
        self.modes = module.modes
        self.poolings = [POOLINGS[mode] for mode in module.modes]

    def forward(self, x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None) -> Tensor:
        """Return float32 [B, C x modes]; `starts` counts leading tokens to leave out."""
        pooled = [pooling(x_TC, cu_seqlens, starts) for pooling in self.poolings]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)


class Dense(nn.Module):
    """activation(W x + b), plus the input (projected where widths differ) if residual."""

    def __init__(self, module: DenseModule) -> None:
        """Declare the weights."""
        super().__init__()
        self.linear = Linear("linear", module.inputs, module.outputs, bias=module.bias)
        self.activation = module.activation
        self.residual = module.residual
        self.project: Linear | None = None
        if module.residual and module.inputs != module.outputs:
            self.project = Linear("residual", module.inputs, module.outputs, bias=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return [B, O]."""
        out_BO = activate(self.linear(x_BI), self.activation)
        if not self.residual:
            return out_BO
        return out_BO + (x_BI if self.project is None else self.project(x_BI))


class Normalize(nn.Module):
    """L2 normalisation."""

    def forward(self, x_BC: Tensor) -> Tensor:
        """Return rows of length 1."""
        return l2_normalize(x_BC)


def build_modules(
    folder: CheckpointFolder,
    recipe: "Recipe",
    hidden_size: int,
    device: torch.device,
    named: NamedTensors,
) -> list[nn.Module]:
    """Make and fill the modules of a recipe, checking that their widths fit.

    A module without a folder of its own finds its weights in `named`, beside the backbone's.

    Raises:
        CheckpointError: widths do not fit, or weights are missing or damaged.
    """
    width = hidden_size * len(recipe.pooling.modes)
    built = []
    for module in recipe.modules:
        built.append(_build(folder, module, width, device, named))
        width = module.outputs if isinstance(module, DenseModule) else width
    return built


def _build(
    folder: CheckpointFolder,
    module: "VectorModule",
    width: int,
    device: torch.device,
    beside: NamedTensors,
) -> nn.Module:
    if isinstance(module, NormalizeModule):
        return Normalize()
    expected = module.inputs if isinstance(module, DenseModule) else module.channels
    if expected != width:
        where = folder.path / module.path / "config.json"
        raise CheckpointError(
            f"{where}: takes {expected} channels, the module before gives {width}"
        )
    built = _make(module)
    if not module.path:
        fill(built, beside, torch.float32, device)
        return built
    tensors = open_tensors(CheckpointFolder(folder.path / module.path))
    named = NamedTensors(tensors, {name: name for name in tensors}, "")
    fill(built, named, torch.float32, device)
    named.check_used(())
    return built


def _make(module: "DenseModule | LayerNormModule") -> nn.Module:
    if isinstance(module, DenseModule):
        return Dense(module)
    return LayerNorm("norm", module.channels, _LAYER_NORM_EPS)
