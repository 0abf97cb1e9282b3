"""config.json of Qwen3 with a mixture of experts. Free of torch."""

from dataclasses import replace

from rose.models.config import ConfigReader
from rose.models.decoder_config import (
    DecoderConfig,
    Experts,
    Family,
    decoder_architecture,
    read_decoder_config,
)
from rose.models.errors import CheckpointError
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
    key = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
    count, per_token = reader.size(key, 128), reader.size("num_experts_per_tok", 8)
    if per_token > count:
        raise CheckpointError(
            f"{reader.where('num_experts_per_tok')}: {per_token} of {count} experts are too many"
        )
    experts = Experts(
        layers=_sparse_layers(reader, config.num_layers),
        count=count,
        per_token=per_token,
        intermediate_size=reader.size("moe_intermediate_size", 768),
        renormalize=reader.get("norm_topk_prob", False, bool),
    )
    return replace(config, experts=experts)


def _sparse_layers(reader: ConfigReader, layers: int) -> frozenset[int]:
    """Return the layers that have experts."""
    dense = reader.get("mlp_only_layers", [], list)
    step = reader.size("decoder_sparse_step", 1)
    return frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


QWEN3_MOE = decoder_architecture(
    "qwen3_moe", read_qwen3_moe_config, "rose.models.qwen3_moe:Qwen3MoeModel"
)
