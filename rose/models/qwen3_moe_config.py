"""config.json of Qwen3 with a mixture of experts. Free of torch."""

from dataclasses import replace

from rose.models.config import ConfigReader
from rose.models.decoder_config import (
    DecoderConfig,
    Family,
    decoder_architecture,
    read_decoder_config,
)
from rose.models.experts_config import read_experts, sparse_layers
from rose.models.windows import FULL, SLIDING, Windows


def _windows(reader: ConfigReader, layers: int) -> Windows:
    """`use_sliding_window` gives a window to every layer."""
    if not reader.get("use_sliding_window", False, bool):
        return Windows((FULL,) * layers, None)
    return Windows((SLIDING,) * layers, reader.size("sliding_window", 4096))


_FAMILY = Family(
    "qwen3_moe",
    vocab_size=151936,
    intermediate_size=6144,
    max_positions=32768,
    hidden_size=2048,
    num_layers=24,
    kv_heads=4,
    qk_norm=True,
    windows=_windows,
)


def read_qwen3_moe_config(reader: ConfigReader) -> DecoderConfig:
    """Read config.json with the defaults of `transformers.Qwen3MoeConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    config = read_decoder_config(_FAMILY, reader)
    experts = read_experts(
        reader,
        sparse_layers(reader, config.num_layers),
        count=128,
        per_token=8,
        intermediate_size=768,
        renormalize=reader.get("norm_topk_prob", False, bool),
    )
    return replace(config, experts=experts)


QWEN3_MOE = decoder_architecture(
    "qwen3_moe", read_qwen3_moe_config, "rose.models.qwen3_moe:Qwen3MoeModel"
)
