"""config.json of Gemma, Gemma 2 and Gemma 3 (text). Free of torch."""

from dataclasses import replace
from functools import partial

from rose.models.config import ConfigReader
from rose.models.decoder_config import (
    DecoderConfig,
    Family,
    decoder_architecture,
    read_decoder_config,
)
from rose.models.errors import CheckpointError
from rose.models.rope import LayerBase, RopeConfig, RopeFacts, read_layer_ropes
from rose.models.windows import FULL, SLIDING, windows_between

# In Gemma 3 layers with a window rotate faster.
_BASES = {
    FULL: LayerBase("rope_theta", 1e6, scales=True),
    SLIDING: LayerBase("rope_local_base_freq", 1e4, scales=False),
}
_TANH = "gelu_pytorch_tanh"


def _gemma3_ropes(
    reader: ConfigReader, layer_types: tuple[str, ...], head_dim: int, positions: int
) -> dict[str, RopeConfig]:
    return read_layer_ropes(reader, layer_types, RopeFacts(head_dim, positions), _BASES)


_GEMMA = Family(
    "gemma",
    vocab_size=256000,
    intermediate_size=24576,
    max_positions=8192,
    hidden_size=3072,
    num_layers=28,
    num_heads=16,
    head_dim=256,
    activation=_TANH,
)
_GEMMA2 = Family(
    "gemma2",
    vocab_size=256000,
    intermediate_size=9216,
    max_positions=8192,
    hidden_size=2304,
    num_layers=26,
    num_heads=8,
    kv_heads=4,
    head_dim=256,
    activation=_TANH,
    activation_key="hidden_activation",
    windows=partial(windows_between, 2),
)
_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3_text",
    vocab_size=262208,
    max_positions=131072,
    qk_norm=True,
    windows=partial(windows_between, 6),
    halves_window=True,
    ropes=_gemma3_ropes,
)


def _scaled(config: DecoderConfig) -> DecoderConfig:
    """Add what all Gemmas have: norms of 1 + weight, and embeddings times sqrt(channels)."""
    return replace(config, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


def read_gemma_config(reader: ConfigReader) -> DecoderConfig:
    """Read config.json with the defaults of `transformers.GemmaConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    config = _scaled(read_decoder_config(_GEMMA, reader))
    # The first configs say "gelu" and mean its approximation.
    return replace(config, activation=_TANH) if config.activation == "gelu" else config


def read_gemma2_config(reader: ConfigReader) -> DecoderConfig:
    """Read config.json with the defaults of `transformers.Gemma2Config`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    return replace(
        _scaled(read_decoder_config(_GEMMA2, reader)),
        scale=_query_scale(reader),
        soft_cap=_cap(reader, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(reader, "final_logit_softcapping", 30.0),
    )


def read_gemma3_config(reader: ConfigReader) -> DecoderConfig:
    """Read config.json with the defaults of `transformers.Gemma3TextConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    if reader.has("attn_logit_softcapping"):
        raise CheckpointError(f"{reader.where('attn_logit_softcapping')} is not one of Gemma 3")
    return replace(
        _scaled(read_decoder_config(_GEMMA3, reader)),
        scale=_query_scale(reader),
        logit_cap=_cap(reader, "final_logit_softcapping", None),
    )


def _query_scale(reader: ConfigReader) -> float:
    return float(reader.size("query_pre_attn_scalar", 256) ** -0.5)


def _cap(reader: ConfigReader, key: str, default: float | None) -> float | None:
    """Read a soft cap; here a null says that there is none.

    Raises:
        CheckpointError: it is not positive.
    """
    if key in reader.values:
        cap = reader.optional(key, float)
    else:
        cap = None if default is None else reader.get(key, default, float)
    if cap is not None and cap <= 0:
        raise CheckpointError(f"{reader.where(key)}: must be above 0, found {cap}")
    return cap


GEMMA = decoder_architecture("gemma", read_gemma_config, tied=True)
GEMMA2 = decoder_architecture(
    "gemma2", read_gemma2_config, "rose.models.gemma:GemmaModel", tied=True
)
GEMMA3 = decoder_architecture(
    "gemma3_text", read_gemma3_config, "rose.models.gemma:GemmaModel", tied=True
)
