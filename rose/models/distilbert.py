"""DistilBERT (Sanh et al., 2019): BERT without segments, with half the layers.

Shape letters: T tokens of the batch, C channels.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from rose.models.encoder import Encoder, LayerNames, WordEmbeddings

if TYPE_CHECKING:
    from rose.models.batch import TokenBatch
    from rose.models.encoder_config import EncoderConfig


class DistilBertModel(Encoder):
    """The encoder; its output is the last layer's hidden states."""

    def __init__(self, config: "EncoderConfig") -> None:
        """Declare all weights of `config`."""
        super().__init__(config, layer_names)
        self.embeddings = WordEmbeddings(config)

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        return self.encode(self.embeddings(batch.input_ids, batch.positions), batch)


def layer_names(index: int) -> LayerNames:
    """Name the tensors of a layer."""
    layer = f"transformer.layer.{index}"
    attention = f"{layer}.attention"
    return LayerNames(
        qkv=(f"{attention}.q_lin", f"{attention}.k_lin", f"{attention}.v_lin"),
        output=f"{attention}.out_lin",
        attention_norm=f"{layer}.sa_layer_norm",
        up=f"{layer}.ffn.lin1",
        down=f"{layer}.ffn.lin2",
        mlp_norm=f"{layer}.output_layer_norm",
    )
