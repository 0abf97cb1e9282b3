"""MPNet (Song et al., 2020): RoBERTa's positions, and a bias of attention by distance.

Shape letters: T tokens of the batch, C channels, H heads, N buckets of distances.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rose.models.encoder import Encoder, LayerNames, WordEmbeddings, rows_after_padding
from rose.models.layers import Embedding
from rose.models.mpnet_config import NUM_BUCKETS, PAD_ID

if TYPE_CHECKING:
    from rose.models.batch import TokenBatch
    from rose.models.encoder_config import EncoderConfig

MAX_DISTANCE = 128  # from here on all distances are alike


class MPNetModel(Encoder):
    """The encoder; its output is the last layer's hidden states."""

    def __init__(self, config: "EncoderConfig") -> None:
        """Declare all weights of `config`."""
        bias = DistanceBias(config.num_heads)
        super().__init__(config, layer_names, bias)
        self.bias = bias  # one table for all layers
        self.embeddings = WordEmbeddings(config)

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        rows_T = rows_after_padding(batch.input_ids, batch.positions, PAD_ID)
        return self.encode(self.embeddings(batch.input_ids, rows_T), batch)


class DistanceBias(Embedding):
    """One number per head and bucket of distances."""

    def __init__(self, num_heads: int) -> None:
        """Declare the table [N, H]."""
        super().__init__("encoder.relative_attention_bias", NUM_BUCKETS, num_heads)

    def forward(self, distance: Tensor) -> Tensor:
        """Return [H, *shape of distance] for integers, the key's position minus the query's."""
        return super().forward(distance_buckets(distance)).movedim(-1, 0)


def distance_buckets(distance: Tensor) -> Tensor:
    """Sort distances into buckets: half of them for keys behind the query.

    Of each half, the first half holds one distance each; the others grow by a constant factor.
    """
    half = NUM_BUCKETS // 2
    exact = half // 2
    near = distance.abs()
    # A distance of 0 has no logarithm; it is exact anyway.
    growth = torch.log(near.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact)
    far = exact + (growth * (half - exact)).long()
    bucket = torch.where(near < exact, near, far.clamp(max=half - 1))
    return bucket + half * (distance > 0)


def layer_names(index: int) -> LayerNames:
    """Name the tensors of a layer."""
    layer = f"encoder.layer.{index}"
    attention = f"{layer}.attention.attn"
    return LayerNames(
        qkv=(f"{attention}.q", f"{attention}.k", f"{attention}.v"),
        output=f"{attention}.o",
        attention_norm=f"{layer}.attention.LayerNorm",
        up=f"{layer}.intermediate.dense",
        down=f"{layer}.output.dense",
        mlp_norm=f"{layer}.output.LayerNorm",
    )
