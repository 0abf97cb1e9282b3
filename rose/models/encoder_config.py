"""Facts of the BERT family: encoders whose norms follow each sum. Free of torch."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rose.models.errors import CheckpointError

if TYPE_CHECKING:
    from rose.models.config import ConfigReader
    from rose.models.rope import RopeConfig

# Tensors that BERT-like checkpoints hold beside the backbone.
IGNORED = (
    r"embeddings\.(position_ids|token_type_ids)",
    r"pooler\.dense\.(weight|bias)",  # sentence vectors come from the recipe's own pooling
    r"cls\.predictions\..+",
    r"cls\.seq_relationship\.(weight|bias)",
    r"lm_head\..+",
)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Facts of a post-norm encoder.

    `max_positions` counts usable tokens. Without `rope` and `slopes`, positions are rows of a table
    of `stated_positions` rows; where that is more, the first rows are not used. `slopes` has one
    for each head where scores fall with distance (ALiBi). `type_vocab_size` is 0 where there are no
    segments. The biases are those of the attention's projections and of the MLP's first and last.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    activation: str
    norm_eps: float
    type_vocab_size: int
    max_positions: int
    stated_positions: int
    rope: "RopeConfig | None" = None
    attention_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    causal: bool = False
    slopes: tuple[float, ...] = ()

    @property
    def learned_positions(self) -> bool:
        """Whether positions are rows of a table."""
        return self.rope is None and not self.slopes

    @property
    def segments(self) -> int:
        """Kinds of segments."""
        return self.type_vocab_size

    @property
    def cached_positions(self) -> int | None:
        """No keys are kept."""
        return None


def read_encoder_config(
    reader: "ConfigReader",
    *,
    vocab_size: int,
    max_positions: int = 512,
    type_vocab_size: int = 2,
    activation: str = "gelu",
    positions: str = "absolute",
) -> EncoderConfig:
    """Read config.json with BERT's keys, which most encoders share.

    The numbers are `transformers`' defaults for the architecture where they differ from BERT's;
    `positions` is the kind that it computes.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    _refuse_variants(reader, positions)
    stated = reader.size("max_position_embeddings", max_positions)
    hidden, heads = reader.size("hidden_size", 768), reader.size("num_attention_heads", 12)
    return EncoderConfig(
        vocab_size=reader.size("vocab_size", vocab_size),
        hidden_size=hidden,
        num_layers=reader.size("num_hidden_layers", 12),
        num_heads=heads,
        head_dim=head_size(reader, hidden, heads),
        intermediate_size=reader.size("intermediate_size", 3072),
        activation=reader.get("hidden_act", activation, str),
        norm_eps=reader.epsilon("layer_norm_eps", 1e-12),
        type_vocab_size=reader.size("type_vocab_size", type_vocab_size) if type_vocab_size else 0,
        max_positions=stated,
        stated_positions=stated,
    )


def head_size(reader: "ConfigReader", hidden: int, heads: int) -> int:
    """Return the channels of a head.

    Raises:
        CheckpointError: the heads do not share the hidden size evenly.
    """
    if hidden % heads:
        raise CheckpointError(
            f"{reader.file}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    return hidden // heads


def leave_out_padding(config: EncoderConfig, reader: "ConfigReader", pad_id: int) -> EncoderConfig:
    """Let positions begin behind the row of the pad token.

    Raises:
        CheckpointError: that leaves no position.
    """
    usable = config.stated_positions - pad_id - 1
    if pad_id < 0 or usable < 1:
        raise CheckpointError(
            f"{reader.file}: pad_token_id {pad_id} leaves none of the {config.stated_positions} "
            "positions of max_position_embeddings"
        )
    return replace(config, max_positions=usable)


def _refuse_variants(reader: "ConfigReader", positions: str) -> None:
    found = reader.get("position_embedding_type", "absolute", str)
    if found != positions:
        raise CheckpointError(
            f"{reader.file}: position_embedding_type: {found!r} is not supported, "
            f"only {positions!r}"
        )
    if reader.get("is_decoder", False, bool):
        raise CheckpointError(f"{reader.file}: is_decoder: an encoder as a decoder is no encoder")
