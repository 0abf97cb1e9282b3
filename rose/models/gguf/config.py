"""The config.json that a GGUF file's metadata amount to.

Every setting of the architecture is either used or refused: a setting that is passed over in
silence would make a model that almost works.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.models.gguf.reader import GgufFile

ROPE_FACTORS = "rope_freqs.weight"  # a tensor that becomes part of the config

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
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
    "attention.causal",
    "pooling_type",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
}
_USED_BY_GEMMA3 = {
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
    "final_logit_softcapping",
}
_WITHOUT_EFFECT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}

# Gemma 3 27B, and it alone, scales attention by hidden / heads; its depth tells it apart.
_LAYERS_OF_GEMMA3_27B = 62


@dataclass(frozen=True)
class Dimensions:
    """Sizes of the model."""

    layers: int
    vocabulary: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int

    def size(self, letter: str) -> int:
        """The size that a shape letter (see `rose.models.gguf.tensors`) stands for."""
        return {
            "V": self.vocabulary,
            "H": self.hidden,
            "F": self.feed_forward,
            "Q": self.heads * self.head_dim,
            "K": self.kv_heads * self.head_dim,
            "D": self.head_dim,
        }[letter]


def check_architecture(gguf: GgufFile) -> None:
    """Refuse what cannot be converted faithfully.

    Raises:
        ConvertError: another architecture, or a setting whose effect a config cannot express.
    """
    if gguf.architecture not in _CLASSES:
        known = ", ".join(_CLASSES)
        raise gguf.error(f"architecture {gguf.architecture!r} is not among those known: {known}")
    if not gguf.get(gguf.own("attention.causal"), bool, True):
        raise gguf.error("the model is bidirectional, which is not supported from a GGUF")
    known_keys = _USED | _WITHOUT_EFFECT
    known_keys |= _USED_BY_GEMMA3 if gguf.architecture == "gemma3" else set()
    for name, value in gguf.settings().items():
        if value and name not in known_keys:
            raise gguf.error(f"setting {gguf.own(name)!r} is not supported")


def read_dimensions(gguf: GgufFile) -> Dimensions:
    """The sizes of the model from the metadata, and of the vocabulary from the embedding."""
    heads = gguf.require(gguf.own("attention.head_count"), int)
    hidden = gguf.require(gguf.own("embedding_length"), int)
    head_dim = gguf.get(gguf.own("attention.key_length"), int, hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := gguf.get(gguf.own(name), int, head_dim)) != head_dim:
            raise gguf.error(f"setting {name!r} is {size}, but heads are {head_dim} wide")
    if "token_embd.weight" not in gguf.tensors:
        raise gguf.error("has no tensor 'token_embd.weight': it holds no language model")
    return Dimensions(
        layers=gguf.require(gguf.own("block_count"), int),
        vocabulary=gguf.shape("token_embd.weight")[0],
        hidden=hidden,
        feed_forward=gguf.require(gguf.own("feed_forward_length"), int),
        heads=heads,
        kv_heads=gguf.get(gguf.own("attention.head_count_kv"), int, heads),
        head_dim=head_dim,
    )


def build_config(
    gguf: GgufFile, dims: Dimensions, *, tied: bool, biases: dict[str, bool], dtype: str
) -> dict[str, Any]:
    """The content of config.json, without the special tokens.

    Raises:
        ConvertError: a rope scaling that cannot be expressed exactly.
    """
    model_class, model_type = _CLASSES[gguf.architecture]
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": model_type,
        "vocab_size": dims.vocabulary,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.feed_forward,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "max_position_embeddings": gguf.require(gguf.own("context_length"), int),
        "rms_norm_eps": _shortest(
            gguf.require(gguf.own("attention.layer_norm_rms_epsilon"), float)
        ),
        "rope_theta": _shortest(gguf.get(gguf.own("rope.freq_base"), float, 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        **biases,
    }
    if scaling := _rope_scaling(gguf, config["rope_theta"], dims.head_dim):
        config["rope_scaling"] = scaling
    extra = _gemma3(gguf, dims) if gguf.architecture == "gemma3" else {"hidden_act": "silu"}
    return config | extra


def _gemma3(gguf: GgufFile, dims: Dimensions) -> dict[str, Any]:
    wide = dims.layers == _LAYERS_OF_GEMMA3_27B
    period = gguf.get(gguf.own("attention.sliding_window_pattern"), int, 6)
    kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
    cap = gguf.get(gguf.own("final_logit_softcapping"), float, 0.0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": dims.hidden // dims.heads if wide else dims.head_dim,
        "sliding_window": gguf.require(gguf.own("attention.sliding_window"), int),
        "layer_types": [kinds[i % period] for i in range(dims.layers)],
        "rope_local_base_freq": _shortest(gguf.get(gguf.own("rope.freq_base_swa"), float, 10000.0)),
        "final_logit_softcapping": cap or None,
    }


def _rope_scaling(gguf: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = gguf.get(gguf.own("rope.scaling.type"), str, "none")
    factor = _shortest(gguf.get(gguf.own("rope.scaling.factor"), float, 1.0))
    original = gguf.get(gguf.own("rope.scaling.original_context_length"), int, 0)
    if ROPE_FACTORS in gguf.tensors:
        if kind != "none":
            raise gguf.error(f"has both rope factors and rope scaling {kind!r}")
        return _llama3_scaling(gguf, theta, head_dim, original or 8192)
    if kind == "none":
        return None
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


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
