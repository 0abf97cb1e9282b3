"""GTE v1.5 (Zhang et al., 2024): BERT with rotary positions and a gated MLP."""

from typing import TYPE_CHECKING

from rose.models.encoder import LayerNames, RotaryEncoder

if TYPE_CHECKING:
    from rose.models.encoder_config import EncoderConfig


class GteModel(RotaryEncoder):
    """The encoder; its output is the last layer's hidden states."""

    def __init__(self, config: "EncoderConfig") -> None:
        """Declare all weights of `config`."""
        super().__init__(config, layer_names)


def layer_names(index: int) -> LayerNames:
    """Name the tensors of a layer; projections of one input are stored as one tensor."""
    layer = f"encoder.layer.{index}"
    attention = f"{layer}.attention"
    return LayerNames(
        qkv=(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        output=f"{attention}.o_proj",
        attention_norm=f"{layer}.attn_ln",
        gate=f"{layer}.mlp.gate_proj",
        up=f"{layer}.mlp.up_proj",
        down=f"{layer}.mlp.down_proj",
        mlp_norm=f"{layer}.mlp_ln",
    )
