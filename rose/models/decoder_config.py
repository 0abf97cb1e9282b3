"""config.json of the Llama family: Llama, Qwen2, Qwen3. Free of torch."""

from dataclasses import dataclass
from functools import partial

from rose.models.architecture import Architecture
from rose.models.classifier_config import last_token_head
from rose.models.config import ConfigReader
from rose.models.errors import CheckpointError
from rose.models.rope import RopeConfig, RopeFacts, read_ropes

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Facts of a pre-norm decoder with rotary positions, gated MLP and grouped-query attention.

    `layer_types` has one entry per layer, "full_attention" or "sliding_attention"; `ropes` one
    per type that occurs. `window` is the sliding layers' (left, right), both inclusive.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: str
    norm_eps: float
    max_positions: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    causal: bool
    layer_types: tuple[str, ...]
    window: tuple[int | None, int | None]
    ropes: dict[str, RopeConfig]

    @property
    def stated_positions(self) -> int:
        """`max_position_embeddings`."""
        return self.max_positions

    @property
    def learned_positions(self) -> bool:
        """Rotary positions have no table."""
        return False

    @property
    def segments(self) -> int:
        """Decoders have none."""
        return 0

    @property
    def cached_positions(self) -> int | None:
        """Tokens up to which keys can be kept: the least of all layers."""
        limits = [rope.fixed_positions for rope in self.ropes.values()]
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, slots=True)
class Family:
    """Where the members of the family differ; the numbers are `transformers`' defaults."""

    name: str
    vocab_size: int
    intermediate_size: int
    max_positions: int
    head_dim: int | None = None
    fixed_qkv_bias: bool | None = None
    qk_norm: bool = False
    mlp_bias: bool = False
    sliding: bool = True


def read_decoder_config(family: Family, reader: ConfigReader) -> DecoderConfig:
    """Read config.json.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    hidden, layers = reader.size("hidden_size", 4096), reader.size("num_hidden_layers", 32)
    heads = reader.size("num_attention_heads", 32)
    head_dim = _head_dim(family, reader, hidden, heads)
    layer_types = _layer_types(family, reader, layers)
    positions = reader.size("max_position_embeddings", family.max_positions)
    causal = _causal(reader)
    bias = _attention_bias(family, reader)
    return DecoderConfig(
        vocab_size=reader.size("vocab_size", family.vocab_size),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(reader, heads),
        head_dim=head_dim,
        intermediate_size=reader.size("intermediate_size", family.intermediate_size),
        activation=reader.get("hidden_act", "silu", str),
        norm_eps=reader.get("rms_norm_eps", 1e-6, float),
        max_positions=positions,
        qkv_bias=bias,
        output_bias=bias and family.fixed_qkv_bias is None,
        mlp_bias=family.mlp_bias and reader.get("mlp_bias", False, bool),
        qk_norm=family.qk_norm,
        causal=causal,
        layer_types=layer_types,
        window=_window(reader, layer_types, causal=causal),
        ropes=read_ropes(reader, layer_types, RopeFacts(head_dim, positions)),
    )


def _head_dim(family: Family, reader: ConfigReader, hidden: int, heads: int) -> int:
    stated = reader.optional_size("head_dim")
    if stated is None and family.head_dim is not None and "head_dim" not in reader.values:
        stated = reader.size("head_dim", family.head_dim)
    if stated is None:
        if hidden % heads:
            raise CheckpointError(
                f"{reader.file}: hidden_size {hidden} is not a multiple of num_attention_heads "
                f"{heads}, and head_dim is not given"
            )
        stated = hidden // heads
        reader.record("head_dim", stated, "hidden_size / num_attention_heads")
    if stated % 2:
        raise CheckpointError(f"{reader.file}: head_dim: must be even for rope, found {stated}")
    return stated


def _kv_heads(reader: ConfigReader, heads: int) -> int:
    kv_heads = reader.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{reader.file}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return kv_heads


def _attention_bias(family: Family, reader: ConfigReader) -> bool:
    if family.fixed_qkv_bias is not None:
        return family.fixed_qkv_bias
    return reader.get("attention_bias", False, bool)


def _causal(reader: ConfigReader) -> bool:
    """Either of the two keys in use makes a decoder bidirectional."""
    causal = reader.get("is_causal", True, bool)
    return causal and not reader.get("use_bidirectional_attention", False, bool)


def _layer_types(family: Family, reader: ConfigReader, layers: int) -> tuple[str, ...]:
    stated = reader.optional("layer_types", list)
    if stated is None:
        return _windowed_layers(family, reader, layers)
    if len(stated) < layers or not all(kind in (FULL, SLIDING) for kind in stated):
        raise CheckpointError(
            f"{reader.file}: layer_types: one of {FULL!r} and {SLIDING!r} for each of {layers} "
            f"layers is expected, found {stated}"
        )
    if not family.sliding and SLIDING in stated:
        raise CheckpointError(f"{reader.file}: layer_types: {family.name} has no sliding windows")
    return tuple(stated[:layers])


def _windowed_layers(family: Family, reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Work layer types out: if windows are used, layers from `max_window_layers` on have one."""
    if not family.sliding or not reader.get("use_sliding_window", False, bool):
        return (FULL,) * layers
    if "sliding_window" in reader.values and not reader.has("sliding_window"):
        return (FULL,) * layers  # here a null says that there is no window
    first = reader.get("max_window_layers", 28, int)
    return tuple(SLIDING if index >= first else FULL for index in range(layers))


def _window(
    reader: ConfigReader, layer_types: tuple[str, ...], *, causal: bool
) -> tuple[int | None, int | None]:
    if SLIDING not in layer_types:
        return (None, None)
    if not reader.get("use_sliding_window", False, bool):
        raise CheckpointError(
            f"{reader.file}: layer_types has sliding layers, but use_sliding_window is not true"
        )
    size = reader.size("sliding_window", 4096)
    # A causal window counts the token itself; a bidirectional one reaches as far to either side.
    return (size - 1, 0) if causal else (size, size)


_IGNORED = (
    r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"rotary_emb\.inv_freq",
    r"lm_head\.weight",  # where the backbone alone is served
)


def _architecture(family: Family) -> Architecture:
    return Architecture(
        name=family.name,
        read_config=partial(read_decoder_config, family),
        backbone="rose.models.decoder:DecoderModel",
        ignored=_IGNORED,
        lm_head=True,
        classifier=last_token_head,
    )


LLAMA = _architecture(
    Family(
        "llama",
        vocab_size=32000,
        intermediate_size=11008,
        max_positions=2048,
        mlp_bias=True,
        sliding=False,
    )
)
QWEN2 = _architecture(
    Family(
        "qwen2",
        vocab_size=151936,
        intermediate_size=22016,
        max_positions=32768,
        fixed_qkv_bias=True,
    )
)
QWEN3 = _architecture(
    Family(
        "qwen3",
        vocab_size=151936,
        intermediate_size=22016,
        max_positions=32768,
        head_dim=128,
        qk_norm=True,
    )
)
