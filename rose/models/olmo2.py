"""OLMo 2 (OLMo Team, 2024): norms after attention and the MLP, and of queries and keys as a whole.

Shape letters: T tokens of the batch, C channels.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from rose.models.decoder import (
    DecoderAttention,
    DecoderLayer,
    DecoderModel,
    Rotation,
    make_norm,
)

if TYPE_CHECKING:
    from rose.kernels.attention.base import AttentionBatch
    from rose.models.decoder_config import DecoderConfig


class Olmo2Attention(DecoderAttention):
    """Attention with one norm over the queries of all heads, and one over the keys."""

    def __init__(self, config: "DecoderConfig", index: int) -> None:
        """Declare the weights of layer `index`."""
        super().__init__(config, index)
        name = f"layers.{index}.self_attn"
        queries, keys, _ = self.qkv.outputs
        # Not `q_norm` and `k_norm`: those of the family are norms of each head.
        self.queries_norm = make_norm(f"{name}.q_norm", queries, config)
        self.keys_norm = make_norm(f"{name}.k_norm", keys, config)

    def project(self, x_TC: Tensor) -> tuple[Tensor, ...]:
        """Return normed queries, normed keys, and values, before the split into heads."""
        queries, keys, values = self.qkv.split(x_TC)
        # Copies: a view of several tokens would go to torch and that of one to the CPU kernel, so
        # that a token's bits would depend on how many are beside it.
        queries, keys = queries.contiguous(), keys.contiguous()
        return self.queries_norm(queries), self.keys_norm(keys), values


class Olmo2Layer(DecoderLayer):
    """Attention and MLP, each before a norm; the sum comes after it."""

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")

    def make_attention(self, config: "DecoderConfig", index: int) -> Olmo2Attention:
        """Declare the weights of attention."""
        return Olmo2Attention(config, index)

    def fuse(self) -> None:
        """Stay as it is: the kernels of whole layers norm before attention and MLP."""

    def forward(
        self,
        x_TC: Tensor,
        residual_TC: Tensor | None,
        rotation: Rotation,
        attention: "AttentionBatch",
    ) -> tuple[Tensor, Tensor]:
        """Return the MLP's normed output and the residual to add to it."""
        if residual_TC is not None:
            x_TC = x_TC + residual_TC
        residual_TC = x_TC + self.attention_norm(self.attention(x_TC, rotation, attention))
        return self.mlp_norm(self.mlp(residual_TC)), residual_TC


class Olmo2Model(DecoderModel):
    """The layers without the LM head; its output is the final norm's."""

    def make_layer(self, config: "DecoderConfig", index: int) -> Olmo2Layer:
        """Declare the weights of layer `index`."""
        return Olmo2Layer(config, index)
