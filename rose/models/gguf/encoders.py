"""The config.json of encoders."""

from typing import Any

from rose.models.gguf.dimensions import Dimensions
from rose.models.gguf.families import Family
from rose.models.gguf.reader import GgufFile, shortest
from rose.models.windows import FULL, SLIDING


def build_encoder_config(gguf: GgufFile, dims: Dimensions, family: Family) -> dict[str, Any]:
    """The content of config.json, without the special tokens and the dtype.

    Raises:
        ConvertError: a setting that is missing, or that the architecture cannot have.
    """
    if dims.kv_heads != dims.heads or dims.head_dim * dims.heads != dims.hidden:
        raise gguf.error(f"heads of a {gguf.architecture} model share keys or have other sizes")
    if gguf.get(gguf.own("rope.scaling.type"), str, "none") != "none":
        raise gguf.error(f"rope scaling is not supported for {gguf.architecture}")
    config = {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "vocab_size": dims.vocabulary,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.feed_forward,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "max_position_embeddings": gguf.require(gguf.own("context_length"), int),
    }
    return config | _EXTRA[gguf.architecture](gguf, dims)


def _bert(gguf: GgufFile, dims: Dimensions) -> dict[str, Any]:
    """Positions count from 0 also where a RoBERTa was stored so: llama.cpp cuts its table."""
    return {
        "max_position_embeddings": dims.positions,
        "type_vocab_size": dims.token_types,
        "layer_norm_eps": _epsilon(gguf),
        "hidden_act": "gelu",
    }


def _nomic_bert(gguf: GgufFile, dims: Dimensions) -> dict[str, Any]:
    return {
        "type_vocab_size": dims.token_types,
        "layer_norm_eps": _epsilon(gguf),
        "hidden_act": "silu",
        "rope_theta": shortest(gguf.require(gguf.own("rope.freq_base"), float)),
    }


def _modern_bert(gguf: GgufFile, dims: Dimensions) -> dict[str, Any]:
    """The first layer of every period sees the whole text."""
    period = gguf.at_least(1, gguf.own("attention.sliding_window_pattern"), 3)
    local = gguf.get(gguf.own("rope.freq_base_swa"), float, 10000.0)
    return {
        "norm_eps": _epsilon(gguf),
        "hidden_activation": gguf.get(gguf.own("hidden_activation"), str, "gelu"),
        "local_attention": gguf.require(gguf.own("attention.sliding_window"), int),
        "layer_types": [SLIDING if i % period else FULL for i in range(dims.layers)],
        "global_rope_theta": shortest(gguf.require(gguf.own("rope.freq_base"), float)),
        "local_rope_theta": shortest(local),
    }


_EXTRA = {"bert": _bert, "nomic-bert": _nomic_bert, "modern-bert": _modern_bert}


def _epsilon(gguf: GgufFile) -> float:
    return shortest(gguf.require(gguf.own("attention.layer_norm_epsilon"), float))
