"""The config.json that a GGUF file's metadata amount to.

Every setting of the architecture is either used or refused: a setting that is passed over in
silence would make a model that almost works.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.models.gguf.dimensions import Dimensions
from rose.models.gguf.encoders import build_encoder_config
from rose.models.gguf.families import FAMILIES
from rose.models.gguf.reader import GgufFile, shortest
from rose.models.windows import FULL, SLIDING

# Tensors that become part of the config.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

_USED = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.causal",
    "pooling_type",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
}
_WITHOUT_EFFECT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}

# The 27B models, and they alone, scale attention by hidden / heads; their depth tells them apart.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def check_architecture(gguf: GgufFile) -> None:
    """Refuse what cannot be converted faithfully.

    Raises:
        ConvertError: another architecture, or a setting whose effect a config cannot express.
    """
    if gguf.architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise gguf.error(f"architecture {gguf.architecture!r} is not among those known: {known}")
    family = FAMILIES[gguf.architecture]
    is_causal = gguf.get(gguf.own("attention.causal"), bool, True)
    if is_causal is family.is_encoder:
        kind = "causal" if is_causal else "bidirectional"
        raise gguf.error(f"the model is {kind}, which is not supported for {gguf.architecture}")
    known_keys = _USED | _WITHOUT_EFFECT | family.settings
    for name, value in gguf.settings().items():
        if value and name not in known_keys:
            raise gguf.error(f"setting {gguf.own(name)!r} is not supported")


def build_config(
    gguf: GgufFile, dims: Dimensions, *, tied: bool, biases: dict[str, bool], dtype: str
) -> dict[str, Any]:
    """The content of config.json, without the special tokens.

    Raises:
        ConvertError: a rope scaling that cannot be expressed exactly.
    """
    family = FAMILIES[gguf.architecture]
    if family.is_encoder:
        return build_encoder_config(gguf, dims, family) | {"torch_dtype": dtype}
    config: dict[str, Any] = {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "vocab_size": dims.vocabulary,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.feed_forward,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "max_position_embeddings": gguf.require(gguf.own("context_length"), int),
        "rms_norm_eps": shortest(gguf.require(gguf.own("attention.layer_norm_rms_epsilon"), float)),
        "rope_theta": shortest(gguf.get(gguf.own("rope.freq_base"), float, 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        **biases,
    }
    if scaling := _rope_scaling(gguf, config["rope_theta"], dims.head_dim):
        config["rope_scaling"] = scaling
    extra = _EXTRA.get(gguf.architecture)
    return config | (extra(gguf, dims) if extra else {"hidden_act": "silu"})


def _gemma(_gguf: GgufFile, _dims: Dimensions) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(gguf: GgufFile, dims: Dimensions) -> dict[str, Any]:
    """The softest caps and the window of llama.cpp's defaults are those of every Gemma 2."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(gguf, dims),
        "sliding_window": gguf.get(gguf.own("attention.sliding_window"), int, 4096),
        "layer_types": _gemma_layers(gguf, dims, 2),
        **{name: gguf.get(gguf.own(name), float, cap) or None for name, cap in caps.items()},
    }


def _gemma3(gguf: GgufFile, dims: Dimensions) -> dict[str, Any]:
    cap = gguf.get(gguf.own("final_logit_softcapping"), float, 0.0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(gguf, dims),
        "sliding_window": gguf.require(gguf.own("attention.sliding_window"), int),
        "layer_types": _gemma_layers(gguf, dims, 6),
        "rope_local_base_freq": shortest(gguf.get(gguf.own("rope.freq_base_swa"), float, 10000.0)),
        "final_logit_softcapping": cap or None,
    }


def _query_scalar(gguf: GgufFile, dims: Dimensions) -> int:
    wide = dims.layers == _LAYERS_OF_27B[gguf.architecture]
    return dims.hidden // dims.heads if wide else dims.head_dim


def _gemma_layers(gguf: GgufFile, dims: Dimensions, default: int) -> list[str]:
    """The last layer of every period sees the whole text."""
    period = gguf.at_least(1, gguf.own("attention.sliding_window_pattern"), default)
    return [SLIDING if (i + 1) % period else FULL for i in range(dims.layers)]


def _qwen3moe(gguf: GgufFile, dims: Dimensions) -> dict[str, Any]:
    """llama.cpp knows no such model with a dense layer, or with weights that do not add up to 1."""
    return {
        "hidden_act": "silu",
        "num_experts": dims.experts,
        "num_experts_per_tok": gguf.require(gguf.own("expert_used_count"), int),
        "moe_intermediate_size": dims.expert_feed_forward,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(gguf: GgufFile, dims: Dimensions) -> dict[str, Any]:
    rotated = gguf.get(gguf.own("rope.dimension_count"), int, dims.head_dim)
    return {
        "hidden_act": "silu",
        "partial_rotary_factor": rotated / dims.head_dim,
        "sliding_window": gguf.get(gguf.own("attention.sliding_window"), int, 0) or None,
        **_longrope(gguf),
    }


_EXTRA: dict[str, Callable[[GgufFile, Dimensions], dict[str, Any]]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "qwen3moe": _qwen3moe,
    "phi3": _phi3,
}


def _longrope(gguf: GgufFile) -> dict[str, Any]:
    """Phi-3's factors for short and for long texts, a number per rotated pair of channels."""
    found = rope_tensors(gguf)
    if not found:
        return {}
    if len(found) == 1:
        raise gguf.error(f"has {found.pop()!r}, and of the long and the short factors only that")
    original = gguf.at_least(2, gguf.own("rope.scaling.original_context_length"))
    scale = max(1.0, gguf.require(gguf.own("context_length"), int) / original)
    usual = math.sqrt(1 + math.log(scale) / math.log(original))
    factor = gguf.get(gguf.own("rope.scaling.attn_factor"), float, usual)
    if not math.isclose(factor, usual, rel_tol=1e-5):
        raise gguf.error(f"rope.scaling.attn_factor is {factor}, and {usual} is supported")
    factors = {"long_factor": LONG_FACTORS, "short_factor": SHORT_FACTORS}
    lists = {
        key: [shortest(value) for value in gguf.read(name).ravel().tolist()]
        for key, name in factors.items()
    }
    return {
        "original_max_position_embeddings": original,
        "rope_scaling": {"rope_type": "longrope", **lists},
    }


def rope_tensors(gguf: GgufFile) -> set[str]:
    """The file's tensors that become part of the config."""
    if FAMILIES[gguf.architecture].is_encoder:
        return set()
    known = {LONG_FACTORS, SHORT_FACTORS} if gguf.architecture == "phi3" else {ROPE_FACTORS}
    return known & gguf.tensors.keys()


def _rope_scaling(gguf: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = gguf.get(gguf.own("rope.scaling.type"), str, "none")
    factor = shortest(gguf.get(gguf.own("rope.scaling.factor"), float, 1.0))
    original = gguf.get(gguf.own("rope.scaling.original_context_length"), int, 0)
    if ROPE_FACTORS in gguf.tensors:
        if kind != "none":
            raise gguf.error(f"has both rope factors and rope scaling {kind!r}")
        return _llama3_scaling(gguf, theta, head_dim, original or 8192)
    if kind == "none" or LONG_FACTORS in gguf.tensors:
        return None  # of the latter `_longrope` makes a setting
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        name = "original_max_position_embeddings"
        return {"rope_type": "yarn", "factor": factor, name: original}
    raise gguf.error(f"rope scaling {kind!r} is not supported")


def _llama3_scaling(
    gguf: GgufFile, theta: float, head_dim: int, original: int
) -> dict[str, Any] | None:
    """The parameters behind the tensor of rope factors [head_dim / 2].

    Every published model uses 1 and 4 as the bounds of the transition, so these are tried; other
    parameters would give other factors, which is checked.
    """
    found = gguf.read(ROPE_FACTORS).ravel()
    if np.all(found == 1):
        return None
    factor = float(np.round(found.max(), 4))
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    expected = _llama3_factors(theta, head_dim, factor, original)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4):
        raise gguf.error(f"tensor {ROPE_FACTORS!r} is not of llama 3's kind of rope scaling")
    return scaling


def _llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> NDArray[Any]:
    """By what each frequency is divided: 1 for short waves, `factor` for long, smooth between."""
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = np.clip((original / waves - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))
