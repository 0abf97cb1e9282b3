"""NomicBERT (Nussbaum et al., 2024): BERT with rotary positions and a gated MLP, without biases."""

from typing import TYPE_CHECKING

from rose.models.encoder import LayerNames, RotaryEncoder

if TYPE_CHECKING:
    from rose.models.encoder_config import EncoderConfig


class NomicBertModel(RotaryEncoder):
    """The encoder; its output is the last layer's hidden states."""

    def __init__(self, config: "EncoderConfig") -> None:
        """Declare all weights of `config`."""
        super().__init__(config, layer_names, norm="emb_ln")


def layer_names(index: int) -> LayerNames:
    """Name the tensors of a layer; q, k and v are stored as `attn.Wqkv`."""
    layer = f"encoder.layers.{index}"
    attention = f"{layer}.attn"
    return LayerNames(
        qkv=(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        output=f"{attention}.out_proj",
        attention_norm=f"{layer}.norm1",
        gate=f"{layer}.mlp.fc12",
        up=f"{layer}.mlp.fc11",
        down=f"{layer}.mlp.fc2",
        mlp_norm=f"{layer}.norm2",
    )
