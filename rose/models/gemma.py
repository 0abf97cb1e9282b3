"""Gemma 2 and 3 (Gemma Team, 2024, 2025): a norm before and after attention, and so for the MLP.

The first Gemma is a plain member of the decoder family.

Shape letters: T tokens of the batch, C channels.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from rose.models.decoder import DecoderLayer, DecoderModel, Rotation, make_norm

if TYPE_CHECKING:
    from rose.kernels.attention.base import AttentionBatch
    from rose.models.decoder_config import DecoderConfig


class GemmaLayer(DecoderLayer):
    """Attention and MLP, each between two norms; the sum comes after the second."""

    def __init__(self, config: "DecoderConfig", index: int) -> None:
        """Declare the weights of layer `index`."""
        super().__init__(config, index)
        name, size = f"layers.{index}", config.hidden_size
        # What Llama calls so stands before the MLP; Gemma's stands after attention.
        self.after_attention = make_norm(f"{name}.post_attention_layernorm", size, config)
        self.mlp_norm = make_norm(f"{name}.pre_feedforward_layernorm", size, config)
        self.after_mlp = make_norm(f"{name}.post_feedforward_layernorm", size, config)

    def fuse(self) -> None:
        """Stay as it is: no kernel computes a layer of four norms."""

    def forward(
        self,
        x_TC: Tensor,
        residual_TC: Tensor | None,
        rotation: Rotation,
        attention: "AttentionBatch",
    ) -> tuple[Tensor, Tensor]:
        """Return the MLP's normed output and the residual to add to it."""
        normed_TC, residual_TC = self.enter(x_TC, residual_TC)
        x_TC = self.after_attention(self.attention(normed_TC, rotation, attention))
        normed_TC, residual_TC = self.mlp_norm.add(x_TC, residual_TC)
        return self.after_mlp(self.mlp(normed_TC)), residual_TC


class GemmaModel(DecoderModel):
    """The layers without the LM head; its output is the final norm's."""

    def make_layer(self, config: "DecoderConfig", index: int) -> GemmaLayer:
        """Declare the weights of layer `index`."""
        return GemmaLayer(config, index)
