"""Qwen3 with a mixture of experts (Qwen Team, 2025)."""

from typing import TYPE_CHECKING

from rose.models.decoder import DecoderLayer, DecoderModel
from rose.models.experts import SparseMLP

if TYPE_CHECKING:
    from torch import nn

    from rose.models.decoder_config import DecoderConfig


class Qwen3MoeLayer(DecoderLayer):
    """A layer with experts in place of its MLP, or with an MLP where the config says so."""

    def make_mlp(self, config: "DecoderConfig", index: int) -> "nn.Module":
        """Declare the weights that follow attention."""
        assert config.experts is not None
        if index in config.experts.layers:
            return SparseMLP(f"layers.{index}.mlp", config, config.experts)
        return super().make_mlp(config, index)


class Qwen3MoeModel(DecoderModel):
    """The layers without the LM head; its output is the final norm's."""

    def make_layer(self, config: "DecoderConfig", index: int) -> Qwen3MoeLayer:
        """Declare the weights of layer `index`."""
        return Qwen3MoeLayer(config, index)
