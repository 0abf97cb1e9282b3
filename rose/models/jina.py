"""JinaBERT (Günther et al., 2023): BERT with ALiBi in place of positions, and a gated MLP.

Shape letters: T tokens of the batch, C channels, H heads.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rose.models.encoder import (
    Encoder,
    EncoderAttention,
    EncoderLayer,
    LayerNames,
    Rotation,
    WordEmbeddings,
    bert_names,
)
from rose.models.layers import LayerNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from rose.kernels.attention.base import AttentionBatch, PositionBias
    from rose.models.batch import TokenBatch
    from rose.models.encoder_config import EncoderConfig
    from rose.models.jina_config import JinaConfig


class LinearBias(nn.Module):
    """ALiBi for attention that looks both ways: a head's slope times the distance, subtracted."""

    slopes: Tensor  # float32 [H]

    def __init__(self, slopes: tuple[float, ...]) -> None:
        """Take the slope of each head."""
        super().__init__()
        self.register_buffer("slopes", torch.tensor(slopes, dtype=torch.float32), persistent=False)

    def forward(self, distance: Tensor) -> Tensor:
        """Return float32 [H, *shape of distance]."""
        return self.slopes.view(-1, *[1] * distance.ndim) * -distance.abs()


class JinaBertModel(Encoder):
    """The encoder; its output is the last layer's hidden states."""

    def __init__(self, config: "JinaConfig") -> None:
        """Declare all weights of `config`."""
        bias = LinearBias(config.slopes)
        super().__init__(config, self.layer_names(config), bias)
        self.bias = bias  # moves to the device with the model
        self.embeddings = WordEmbeddings(config)

    def layer_names(self, config: "JinaConfig") -> "Callable[[int], LayerNames]":
        """Choose how the tensors of a layer are named."""
        return gated_names if config.gated else bert_names

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        x_TC = self.embeddings(batch.input_ids, batch.positions, batch.token_type_ids)
        return self.encode(x_TC, batch)


class JinaCodeModel(JinaBertModel):
    """The encoder of the model for code, with norms of queries and keys."""

    def layer_names(self, config: "JinaConfig") -> "Callable[[int], LayerNames]":
        """Choose how the tensors of a layer are named."""
        return gated_code_names if config.gated else code_names

    def make_layer(
        self,
        config: "EncoderConfig",
        index: int,
        names: LayerNames,
        bias: "PositionBias | None",
    ) -> EncoderLayer:
        """Declare the weights of layer `index`."""
        return JinaCodeLayer(config, index, names, bias)


class JinaCodeLayer(EncoderLayer):
    """A layer that adds its input twice: within attention, and once more after its norm."""

    def __init__(
        self,
        config: "EncoderConfig",
        index: int,
        names: LayerNames,
        bias: "PositionBias | None" = None,
    ) -> None:
        """Declare the weights of layer `index`."""
        super().__init__(config, index, names, bias)
        name = f"encoder.layer.{index}.layer_norm_1"
        self.sum_norm = LayerNorm(name, config.hidden_size, config.norm_eps)

    def make_attention(
        self,
        config: "EncoderConfig",
        index: int,
        names: LayerNames,
        bias: "PositionBias | None",
    ) -> EncoderAttention:
        """Declare the weights of attention."""
        return JinaCodeAttention(config, index, names, bias)

    def fuse(self) -> None:
        """Stay as it is: the kernels of whole layers know neither norm."""

    def forward(
        self, x_TC: Tensor, attention: "AttentionBatch", rotation: Rotation | None
    ) -> Tensor:
        """Return [T, C]."""
        x_TC = self.sum_norm.add(self.attention(x_TC, attention, rotation), x_TC)
        return self.norm.add(self.mlp(x_TC), x_TC)


class JinaCodeAttention(EncoderAttention):
    """Attention with one norm over the queries of all heads, and one over the keys."""

    def __init__(
        self,
        config: "EncoderConfig",
        index: int,
        names: LayerNames,
        bias: "PositionBias | None" = None,
    ) -> None:
        """Declare the weights of layer `index`."""
        super().__init__(config, index, names, bias)
        name, size = f"encoder.layer.{index}.attention.self", config.hidden_size
        self.queries_norm = LayerNorm(f"{name}.layer_norm_q", size, config.norm_eps)
        self.keys_norm = LayerNorm(f"{name}.layer_norm_k", size, config.norm_eps)

    def project(self, x_TC: Tensor) -> tuple[Tensor, ...]:
        """Return normed queries, normed keys, and values, before the split into heads."""
        queries, keys, values = self.qkv.split(x_TC)
        # Copies, so that a token's bits do not depend on how many are beside it.
        queries, keys = queries.contiguous(), keys.contiguous()
        return self.queries_norm(queries), self.keys_norm(keys), values


def gated_names(index: int) -> LayerNames:
    """Name the tensors of a layer; gate and up are stored as `mlp.gated_layers`."""
    return _rename(index, gate="mlp.gate", up="mlp.up", down="mlp.wo", norm="mlp.layernorm")


def gated_code_names(index: int) -> LayerNames:
    """Name the tensors of a layer of the model for code; as `mlp.up_gated_layer` up is first."""
    return _rename(index, gate="mlp.gate", up="mlp.up", down="mlp.down_layer", norm="layer_norm_2")


def code_names(index: int) -> LayerNames:
    """Name the tensors of a layer of the model for code, without a gate."""
    return _rename(index, gate=None, up="mlp.up_layer", down="mlp.down_layer", norm="layer_norm_2")


def _rename(index: int, *, gate: str | None, up: str, down: str, norm: str) -> LayerNames:
    """BERT's names, but those of the MLP and its norm."""
    layer, bert = f"encoder.layer.{index}", bert_names(index)
    return LayerNames(
        qkv=bert.qkv,
        output=bert.output,
        attention_norm=bert.attention_norm,
        up=f"{layer}.{up}",
        down=f"{layer}.{down}",
        mlp_norm=f"{layer}.{norm}",
        gate=None if gate is None else f"{layer}.{gate}",
    )
