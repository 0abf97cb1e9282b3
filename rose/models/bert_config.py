"""BERT's config.json. Free of torch."""

from dataclasses import dataclass

from rose.models.architecture import Architecture
from rose.models.config import ConfigReader
from rose.models.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Facts of a BERT encoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str
    max_positions: int
    type_vocab_size: int
    norm_eps: float
    learned_positions: bool = True
    causal: bool = False

    @property
    def stated_positions(self) -> int:
        """`max_position_embeddings`: BERT's positions start at 0, so all of the table is usable."""
        return self.max_positions

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads


def read_bert_config(reader: ConfigReader) -> BertConfig:
    """Read config.json with the defaults of `transformers.BertConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    _refuse_variants(reader)
    config = BertConfig(
        vocab_size=reader.size("vocab_size", 30522),
        hidden_size=reader.size("hidden_size", 768),
        num_layers=reader.size("num_hidden_layers", 12),
        num_heads=reader.size("num_attention_heads", 12),
        intermediate_size=reader.size("intermediate_size", 3072),
        activation=reader.get("hidden_act", "gelu", str),
        max_positions=reader.size("max_position_embeddings", 512),
        type_vocab_size=reader.size("type_vocab_size", 2),
        norm_eps=reader.get("layer_norm_eps", 1e-12, float),
    )
    if config.hidden_size % config.num_heads:
        raise CheckpointError(
            f"{reader.file}: hidden_size {config.hidden_size} is not a multiple of "
            f"num_attention_heads {config.num_heads}"
        )
    return config


def _refuse_variants(reader: ConfigReader) -> None:
    positions = reader.get("position_embedding_type", "absolute", str)
    if positions != "absolute":
        raise CheckpointError(
            f"{reader.file}: position_embedding_type: {positions!r} is not supported, "
            "only 'absolute'"
        )
    if reader.get("is_decoder", False, bool):
        raise CheckpointError(f"{reader.file}: is_decoder: BERT as a decoder is not supported")


BERT = Architecture(
    name="bert",
    read_config=read_bert_config,
    backbone="rose.models.bert:BertModel",
    ignored=(
        r"embeddings\.(position_ids|token_type_ids)",
        r"pooler\.dense\.(weight|bias)",  # sentence vectors come from the recipe's own pooling
        r"cls\.predictions\..+",
        r"cls\.seq_relationship\.(weight|bias)",
    ),
)
