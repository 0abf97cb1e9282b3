"""What an embedder makes of each token, beside or instead of a dense vector of the text.

BGE-M3 does: a vector for each token, to be compared one by one (as in ColBERT), and a weight, which
is that of the token's word. Both come from the hidden states that the dense vector is pooled from.
A late-interaction model has vectors of tokens alone, by the modules that its checkpoint lists.

Shape letters: T tokens, C channels of the backbone, D channels of a token's vector.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rose.kernels.normalize import l2_normalize
from rose.models.errors import CheckpointError
from rose.models.layers import Linear
from rose.models.recipe_modules import TOKEN_VECTORS_FILE, TOKEN_WEIGHTS_FILE
from rose.models.tensors import CheckpointTensors
from rose.models.weight_files import WeightFiles
from rose.models.weights import NamedTensors, fill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rose.models.config import CheckpointFolder


class TokenVectors(nn.Module):
    """A projection of each token's hidden state, scaled to length 1."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Declare the projection's weights."""
        super().__init__()
        self.dimensions = outputs
        self.linear = Linear("linear", inputs, outputs, bias=True)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return float32 [T, D]."""
        return l2_normalize(self.linear(x_TC.float()))


class TokenModules(nn.Module):
    """Modules that each token's hidden state passes through."""

    def __init__(self, modules: "Sequence[nn.Module]", dimensions: int) -> None:
        """Pass through `modules` in this order, in float32; the last gives `dimensions` numbers."""
        super().__init__()
        self.dimensions = dimensions
        self.modules_in_turn = nn.ModuleList(modules)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return float32 [T, D]."""
        x_TC = x_TC.float()
        for module in self.modules_in_turn:
            x_TC = module(x_TC)
        return x_TC


class TokenWeights(nn.Module):
    """A weight of each token, not negative."""

    def __init__(self, inputs: int) -> None:
        """Declare the projection's weights."""
        super().__init__()
        self.linear = Linear("linear", inputs, 1, bias=True)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return float32 [T, 1]."""
        return torch.relu(self.linear(x_TC.float()))


def load_token_vectors(
    folder: "CheckpointFolder", size: int, device: torch.device
) -> TokenVectors | None:
    """Load the head of token vectors, None where the folder has none.

    Raises:
        CheckpointError: it is damaged or does not fit the backbone.
    """
    named = _open(folder, TOKEN_VECTORS_FILE)
    if named is None:
        return None
    head = TokenVectors(size, named.tensors.get("weight").shape[0])
    fill(head, named, torch.float32, device)
    return head.eval()


def load_token_weights(
    folder: "CheckpointFolder", size: int, device: torch.device
) -> TokenWeights | None:
    """Load the head of token weights, None where the folder has none.

    Raises:
        CheckpointError: it is damaged or does not fit the backbone.
    """
    named = _open(folder, TOKEN_WEIGHTS_FILE)
    if named is None:
        return None
    head = TokenWeights(size)
    fill(head, named, torch.float32, device)
    return head.eval()


def _open(folder: "CheckpointFolder", name: str) -> NamedTensors | None:
    if not folder.exists(name):
        return None
    path = folder.path / name
    tensors = CheckpointTensors(WeightFiles((path,), safetensors=False))
    if set(tensors) != {"weight", "bias"} or not tensors.get("weight").ndim:
        raise CheckpointError(f"{path}: weight and bias are expected, found {sorted(tensors)}")
    return NamedTensors(tensors, {f"linear.{key}": key for key in tensors}, "")
