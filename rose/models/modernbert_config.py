"""ModernBERT's config.json. Free of torch."""

from dataclasses import dataclass

from rose.models.architecture import Architecture
from rose.models.classifier_config import ClassifierHead
from rose.models.config import ConfigReader
from rose.models.encoder_config import head_size
from rose.models.errors import CheckpointError
from rose.models.rope import LayerBase, RopeConfig, RopeFacts, read_layer_ropes

FULL, SLIDING = "full_attention", "sliding_attention"
_BASES = {
    FULL: LayerBase("global_rope_theta", 160000.0, scales=True),
    SLIDING: LayerBase("local_rope_theta", 10000.0, scales=True),
}


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    """Facts of a ModernBERT.

    `layer_types` has one entry per layer; a sliding layer sees `window` positions to either side.
    `ropes` has one entry per type that occurs.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    activation: str
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    max_positions: int
    layer_types: tuple[str, ...]
    window: int
    ropes: dict[str, RopeConfig]
    causal: bool = False
    learned_positions: bool = False
    segments: int = 0
    cached_positions: int | None = None

    @property
    def stated_positions(self) -> int:
        """`max_position_embeddings`."""
        return self.max_positions


def read_modernbert_config(reader: ConfigReader) -> ModernBertConfig:
    """Read config.json with the defaults of `transformers.ModernBertConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    hidden, heads = reader.size("hidden_size", 768), reader.size("num_attention_heads", 12)
    layer_types = _layer_types(reader, reader.size("num_hidden_layers", 22))
    positions = reader.size("max_position_embeddings", 8192)
    head_dim = head_size(reader, hidden, heads)
    return ModernBertConfig(
        vocab_size=reader.size("vocab_size", 50368),
        hidden_size=hidden,
        num_layers=len(layer_types),
        num_heads=heads,
        head_dim=head_dim,
        intermediate_size=reader.size("intermediate_size", 1152),
        activation=reader.get("hidden_activation", "gelu", str),
        norm_eps=reader.epsilon("norm_eps", 1e-5),
        norm_bias=reader.get("norm_bias", False, bool),
        attention_bias=reader.get("attention_bias", False, bool),
        mlp_bias=reader.get("mlp_bias", False, bool),
        max_positions=positions,
        layer_types=layer_types,
        window=reader.size("local_attention", 128) // 2,
        ropes=read_layer_ropes(reader, layer_types, RopeFacts(head_dim, positions), _BASES),
    )


def _layer_types(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Read the layers' types; in older configs every n-th layer sees the whole text."""
    stated = reader.optional("layer_types", list)
    if stated is None:
        every = reader.size("global_attn_every_n_layers", 3)
        return tuple(SLIDING if index % every else FULL for index in range(layers))
    if len(stated) < layers or not all(isinstance(k, str) and k in _BASES for k in stated):
        raise CheckpointError(
            f"{reader.file}: layer_types: one of {', '.join(_BASES)} for each of {layers} layers "
            f"is expected, found {stated}"
        )
    return tuple(stated[:layers])


def modernbert_head(reader: ConfigReader) -> ClassifierHead:
    """Read the facts of the classification head.

    Raises:
        CheckpointError: a setting is malformed.
    """
    pooling = reader.get("classifier_pooling", "cls", str)
    if pooling not in ("cls", "mean"):
        raise CheckpointError(
            f"{reader.where('classifier_pooling')}: cls or mean is expected, found {pooling!r}"
        )
    return ClassifierHead(
        pooling,
        "classifier",
        dense="head.dense",
        dense_bias=reader.get("classifier_bias", False, bool),
        activation=reader.get("classifier_activation", "gelu", str),
        norm="head.norm",
        norm_bias=reader.get("norm_bias", False, bool),
        norm_eps=reader.epsilon("norm_eps", 1e-5),
    )


MODERNBERT = Architecture(
    name="modernbert",
    read_config=read_modernbert_config,
    backbone="rose.models.modernbert:ModernBertModel",
    ignored=(r"head\..+", r"decoder\.(weight|bias)"),
    fused=(("Wqkv", ("q_proj", "k_proj", "v_proj")), ("Wi", ("gate", "up"))),
    classifier=modernbert_head,
)
