"""config.json of the Llama family: pre-norm decoders with a gated MLP. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rose.models.architecture import Architecture, Fused
from rose.models.classifier_config import last_token_head
from rose.models.config import ConfigReader
from rose.models.errors import CheckpointError
from rose.models.rope import RopeConfig, RopeFacts, read_ropes
from rose.models.windows import (
    Windows,
    no_windows,
    windows_everywhere,
    windows_on_request,
)

BACKBONE = "rose.models.decoder:DecoderModel"


@dataclass(frozen=True, slots=True)
class Experts:
    """Facts of a mixture of experts.

    `layers` are those that have one instead of an MLP; `per_token` of `count` experts serve a
    token. `renormalize` says whether their weights are made to sum up to 1.
    """

    layers: frozenset[int]
    count: int
    per_token: int
    intermediate_size: int
    renormalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Facts of a pre-norm decoder with rotary positions, gated MLP and grouped-query attention.

    `layer_types` has one entry per layer, "full_attention" or "sliding_attention"; `ropes` one
    per type that occurs. `window` is the sliding layers' (left, right), both inclusive. `scale`
    multiplies attention scores, which `soft_cap` bounds, as `logit_cap` does the LM head's logits.
    Norms multiply by `norm_offset` + weight, embeddings by `embedding_scale`.
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
    scale: float
    soft_cap: float | None = None
    logit_cap: float | None = None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    experts: Experts | None = None

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


RopeReader = Callable[[ConfigReader, tuple[str, ...], int, int], dict[str, RopeConfig]]


def plain_ropes(
    reader: ConfigReader, layer_types: tuple[str, ...], head_dim: int, positions: int
) -> dict[str, RopeConfig]:
    """Read rotary settings that all layers share; every channel of a head rotates."""
    return read_ropes(reader, layer_types, RopeFacts(head_dim, positions))


@dataclass(frozen=True, slots=True)
class Family:
    """Where the members of the family differ; the numbers are `transformers`' defaults.

    `attention_bias` is None where the config decides. `halves_window` says that the config gives
    the whole width of a bidirectional window, not the reach to either side.
    """

    name: str
    vocab_size: int
    intermediate_size: int
    max_positions: int
    hidden_size: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    activation: str = "silu"
    activation_key: str = "hidden_act"
    attention_bias: bool | None = None
    qk_norm: bool = False
    mlp_bias: bool = False
    windows: Callable[[ConfigReader, int], Windows] = no_windows
    halves_window: bool = False
    ropes: RopeReader = plain_ropes


def read_decoder_config(family: Family, reader: ConfigReader) -> DecoderConfig:
    """Read config.json.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    hidden = reader.size("hidden_size", family.hidden_size)
    layers = reader.size("num_hidden_layers", family.num_layers)
    heads = reader.size("num_attention_heads", family.num_heads)
    head_dim = _head_dim(family, reader, hidden, heads)
    positions = reader.size("max_position_embeddings", family.max_positions)
    windows = family.windows(reader, layers)
    causal = _causal(reader)
    bias = _attention_bias(family, reader)
    return DecoderConfig(
        vocab_size=reader.size("vocab_size", family.vocab_size),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(family, reader, heads),
        head_dim=head_dim,
        intermediate_size=reader.size("intermediate_size", family.intermediate_size),
        activation=reader.get(family.activation_key, family.activation, str),
        norm_eps=reader.epsilon("rms_norm_eps", family.norm_eps),
        max_positions=positions,
        qkv_bias=bias,
        output_bias=bias and family.attention_bias is None,
        mlp_bias=family.mlp_bias and reader.get("mlp_bias", False, bool),
        qk_norm=family.qk_norm,
        causal=causal,
        layer_types=windows.layer_types,
        window=_window(family, reader, windows.size, causal=causal),
        ropes=family.ropes(reader, windows.layer_types, head_dim, positions),
        scale=head_dim**-0.5,
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


def _kv_heads(family: Family, reader: ConfigReader, heads: int) -> int:
    is_absent = "num_key_value_heads" not in reader.values
    default = family.kv_heads if is_absent and family.kv_heads is not None else heads
    kv_heads = reader.size("num_key_value_heads", default)
    if heads % kv_heads:
        raise CheckpointError(
            f"{reader.file}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return kv_heads


def _attention_bias(family: Family, reader: ConfigReader) -> bool:
    if family.attention_bias is not None:
        return family.attention_bias
    return reader.get("attention_bias", False, bool)


def _causal(reader: ConfigReader) -> bool:
    """Either of the two keys in use makes a decoder bidirectional."""
    causal = reader.get("is_causal", True, bool)
    return causal and not reader.get("use_bidirectional_attention", False, bool)


def _window(
    family: Family, reader: ConfigReader, size: int | None, *, causal: bool
) -> tuple[int | None, int | None]:
    """Return how far to its (left, right) a token sees in a sliding layer."""
    if size is None:
        return (None, None)
    if causal:
        return (size - 1, 0)  # a causal window counts the token itself
    halves = family.halves_window and reader.values.get("use_bidirectional_attention") is True
    reach = size // 2 if halves else size
    return (reach, reach)


def _phi3_ropes(
    reader: ConfigReader, layer_types: tuple[str, ...], head_dim: int, positions: int
) -> dict[str, RopeConfig]:
    """Read Phi-3's: a share of the channels may rotate, and longrope had other names."""
    facts = RopeFacts(
        head_dim,
        positions,
        original_positions=4096,
        partial=True,
        kinds={"su": "longrope", "yarn": "longrope"},
    )
    return read_ropes(reader, layer_types, facts)


_IGNORED = (
    r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"rotary_emb\.inv_freq",
    r"lm_head\.weight",  # where the backbone alone is served
)


def decoder_architecture(
    name: str,
    read_config: Callable[[ConfigReader], DecoderConfig],
    backbone: str = BACKBONE,
    fused: Fused = (),
    *,
    tied: bool = False,
    lm_head: bool = True,
) -> Architecture:
    """Make the registry's entry of a decoder."""
    return Architecture(
        name=name,
        read_config=read_config,
        backbone=backbone,
        ignored=_IGNORED,
        fused=fused,
        lm_head=lm_head,
        tie_default=tied,
        classifier=last_token_head,
    )


def _architecture(family: Family, fused: Fused = ()) -> Architecture:
    read_config = partial(read_decoder_config, family)
    return decoder_architecture(family.name, read_config, fused=fused)


LLAMA = _architecture(
    Family(
        "llama",
        vocab_size=32000,
        intermediate_size=11008,
        max_positions=2048,
        mlp_bias=True,
    )
)
MISTRAL = _architecture(
    Family(
        "mistral",
        vocab_size=32000,
        intermediate_size=14336,
        max_positions=131072,
        kv_heads=8,
        attention_bias=False,
        windows=partial(windows_everywhere, 4096),
    )
)
PHI3 = _architecture(
    Family(
        "phi3",
        vocab_size=32064,
        intermediate_size=8192,
        max_positions=4096,
        hidden_size=3072,
        norm_eps=1e-5,
        attention_bias=False,
        windows=partial(windows_everywhere, None),
        ropes=_phi3_ropes,
    ),
    fused=(
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ),
)
QWEN2 = _architecture(
    Family(
        "qwen2",
        vocab_size=151936,
        intermediate_size=22016,
        max_positions=32768,
        attention_bias=True,
        windows=windows_on_request,
    )
)
_QWEN3 = Family(
    "qwen3",
    vocab_size=151936,
    intermediate_size=22016,
    max_positions=32768,
    head_dim=128,
    qk_norm=True,
    windows=windows_on_request,
)
QWEN3 = _architecture(_QWEN3)


def _read_pplx_config(reader: ConfigReader) -> DecoderConfig:
    """Read a Qwen3 that sees both ways unless it is told otherwise (pplx-embed)."""
    if not reader.has("is_causal"):
        reader.override({"is_causal": False}, f"default of {reader.architecture}")
    return read_decoder_config(_QWEN3, reader)


PPLX_QWEN3 = decoder_architecture("bidirectional_pplx_qwen3", _read_pplx_config, lm_head=False)
