"""SPLADE: a weight for each token of the vocabulary, pooled from a masked language model's logits.

Shape letters: T tokens, B sequences, C channels of the backbone, V vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rose.kernels import pooling
from rose.models.errors import CheckpointError
from rose.models.heads import EMBEDDING
from rose.models.layers import LayerNorm, Linear

if TYPE_CHECKING:
    from rose.models.masked_lm_config import MaskedHead
    from rose.models.recipe_modules import SpladeModule
    from rose.models.weights import NamedTensors

_EMBEDDINGS = ("embeddings.word_embeddings.weight", EMBEDDING)


class SpladePooler(nn.Module):
    """A masked language model's head, then log(1 + relu(logit)), then the maximum or the sum."""

    modes: tuple[str, ...] = ()  # none that works on hidden states

    def __init__(self, module: "SpladeModule", head: "MaskedHead", size: int, vocab: int) -> None:
        """Declare the head's weights."""
        super().__init__()
        self.strategy = module.strategy
        self.twice = module.twice
        self.dense = Linear(head.dense, size, size, bias=True, activation=head.activation)
        self.norm = LayerNorm(head.norm, size, head.norm_eps)
        self.decoder = Linear(head.decoder, size, vocab, bias=True)

    def untie(self) -> None:
        """Give the decoder a copy of its own.

        A projection that is prepared gives its weight away, and the embedding of an encoder needs
        the rows of that same table.
        """
        weight = nn.Parameter(self.decoder.weight.clone(), requires_grad=False)
        self.decoder.register_parameter("weight", weight)

    def forward(self, x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None) -> Tensor:
        """Return float32 [B, V]; `starts` counts leading tokens to leave out.

        On a CPU the logits [T, V] of one sequence at a time are in memory.
        """
        if x_TC.is_cuda:
            return self._pool(x_TC, cu_seqlens, starts)
        ends: list[int] = cu_seqlens.tolist()
        skips = [0] * (len(ends) - 1) if starts is None else starts.tolist()
        rows = [
            self._pool(x_TC[start + skip : end], cu_seqlens.new_tensor([0, end - start - skip]))
            for start, end, skip in zip(ends[:-1], ends[1:], skips, strict=True)
        ]
        return torch.cat(rows)

    def _pool(self, x_TC: Tensor, cu_seqlens: Tensor, starts: Tensor | None = None) -> Tensor:
        logits_TV = self.decoder(self.norm(self.dense(x_TC))).float()
        if self.strategy == "max":  # what grows with the logit can come after the maximum
            return self._weigh(pooling.maximum(logits_TV, cu_seqlens, starts))
        count_B1 = cu_seqlens.diff().unsqueeze(1)
        if starts is not None:
            count_B1 = count_B1 - starts.unsqueeze(1)
        return pooling.mean(self._weigh(logits_TV), cu_seqlens, starts) * count_B1

    def _weigh(self, logits: Tensor) -> Tensor:
        weights = torch.log1p(torch.relu(logits))
        return torch.log1p(weights) if self.twice else weights


def share_decoder(named: "NamedTensors", head: "MaskedHead") -> None:
    """Let the token embedding be the decoder, and the head's bias its bias, where they are stored
    once.

    Raises:
        CheckpointError: there is no head.
    """
    if f"{head.dense}.weight" not in named:
        raise CheckpointError(
            f"tensor '{head.dense}.weight' is missing: a sparse embedder needs the head of a "
            "masked language model"
        )
    weight, bias = f"{head.decoder}.weight", f"{head.decoder}.bias"
    if weight not in named:
        source = next((name for name in _EMBEDDINGS if name in named), None)
        if source is not None:
            named.names[weight] = named.names[source]
    if bias not in named and head.bias in named:
        named.names[bias] = named.names[head.bias]
