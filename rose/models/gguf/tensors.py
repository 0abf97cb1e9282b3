"""Which tensor of a GGUF file becomes which tensor of a checkpoint, and what changes on the way.

Shape letters of the tables: V vocabulary, H hidden, F feed-forward, Q query heads x head dim,
K key-value heads x head dim, D head dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rose.models.gguf.config import ROPE_FACTORS, Dimensions
from rose.models.gguf.reader import GgufFile

Values = NDArray[np.float32]
Table = dict[str, tuple[str, str]]  # name in the GGUF -> (name in the checkpoint, shape letters)

_TOP: Table = {
    "token_embd.weight": ("model.embed_tokens.weight", "VH"),
    "output_norm.weight": ("model.norm.weight", "H"),
}
_HEAD: Table = {"output.weight": ("lm_head.weight", "VH")}

_PROJECTIONS: Table = {
    "attn_q.weight": ("self_attn.q_proj.weight", "QH"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KH"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KH"),
    "attn_output.weight": ("self_attn.o_proj.weight", "HQ"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "FH"),
    "ffn_up.weight": ("mlp.up_proj.weight", "FH"),
    "ffn_down.weight": ("mlp.down_proj.weight", "HF"),
}
_NORMS: Table = {
    "attn_norm.weight": ("input_layernorm.weight", "H"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "H"),
}
_SANDWICH_NORMS: Table = {
    "attn_norm.weight": ("input_layernorm.weight", "H"),
    "post_attention_norm.weight": ("post_attention_layernorm.weight", "H"),
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", "H"),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", "H"),
}
_QK_NORMS: Table = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "D"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "D"),
}
_QKV_BIAS: Table = {
    "attn_q.bias": ("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": ("self_attn.k_proj.bias", "K"),
    "attn_v.bias": ("self_attn.v_proj.bias", "K"),
}
_ATTENTION_BIAS: Table = _QKV_BIAS | {"attn_output.bias": ("self_attn.o_proj.bias", "H")}
_MLP_BIAS: Table = {
    "ffn_gate.bias": ("mlp.gate_proj.bias", "F"),
    "ffn_up.bias": ("mlp.up_proj.bias", "F"),
    "ffn_down.bias": ("mlp.down_proj.bias", "H"),
}

_LAYER: dict[str, Table] = {
    "llama": _PROJECTIONS | _NORMS,
    "qwen2": _PROJECTIONS | _NORMS | _QKV_BIAS,
    "qwen3": _PROJECTIONS | _NORMS | _QK_NORMS,
    "gemma3": _PROJECTIONS | _SANDWICH_NORMS | _QK_NORMS,
}
# Flags of the config that bring biases of their own, all or none.
_BIASES: dict[str, dict[str, Table]] = {
    "llama": {"attention_bias": _ATTENTION_BIAS, "mlp_bias": _MLP_BIAS},
    "qwen2": {},
    "qwen3": {"attention_bias": _ATTENTION_BIAS},
    "gemma3": {"attention_bias": _ATTENTION_BIAS},
}


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write: `target` [shape] is `change` of the tensor `source` of the GGUF."""

    source: str
    target: str
    shape: tuple[int, ...]
    change: Callable[[Values], Values]


def bias_flags(gguf: GgufFile) -> dict[str, bool]:
    """The config's flags for biases, read from which tensors the first layer has."""
    flags = _BIASES[gguf.architecture]
    return {flag: any(f"blk.0.{name}" in gguf.tensors for name in flags[flag]) for flag in flags}


def is_tied(gguf: GgufFile) -> bool:
    """Whether the head is the embedding: no tensor of its own, or the same bytes twice."""
    head, embedding = gguf.tensors.get("output.weight"), gguf.tensors.get("token_embd.weight")
    if head is None or embedding is None:
        return True
    return head.tensor_type == embedding.tensor_type and np.array_equal(head.data, embedding.data)


def plan_tensors(gguf: GgufFile, dims: Dimensions, *, tied: bool) -> list[TensorPlan]:
    """All tensors of the checkpoint, in the order of the layers.

    Raises:
        ConvertError: a tensor is missing, is of another shape than the metadata say, or is one
            that the architecture has no place for.
    """
    plans = [_plan(gguf, dims, *entry) for entry in _entries(gguf, dims, tied=tied)]
    known = (
        {plan.source for plan in plans} | {ROPE_FACTORS} | ({"output.weight"} if tied else set())
    )
    if unknown := sorted(gguf.tensors.keys() - known):
        raise gguf.error(
            f"tensor {unknown[0]!r} has no place in a {gguf.architecture} model"
            + (f" (nor have {len(unknown) - 1} more)" if len(unknown) > 1 else "")
        )
    return plans


def _entries(gguf: GgufFile, dims: Dimensions, *, tied: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (source, target, shape letters) of every tensor that the architecture wants."""
    layer = dict(_LAYER[gguf.architecture])
    for flag, present in bias_flags(gguf).items():
        layer |= _BIASES[gguf.architecture][flag] if present else {}
    for source, (target, letters) in (_TOP if tied else _TOP | _HEAD).items():
        yield source, target, letters
    for i in range(dims.layers):
        for source, (target, letters) in layer.items():
            yield f"blk.{i}.{source}", f"model.layers.{i}.{target}", letters


def _plan(gguf: GgufFile, dims: Dimensions, source: str, target: str, letters: str) -> TensorPlan:
    if source not in gguf.tensors:
        raise gguf.error(f"has no tensor {source!r}, which a {gguf.architecture} model needs")
    shape = tuple(dims.size(letter) for letter in letters)
    if gguf.shape(source) != shape:
        found = gguf.shape(source)
        raise gguf.error(f"tensor {source!r} has shape {found}, but the metadata say {shape}")
    return TensorPlan(source, target, shape, _change(gguf.architecture, source, dims))


def _change(architecture: str, source: str, dims: Dimensions) -> Callable[[Values], Values]:
    stem = source.split(".")[-2]
    if architecture == "llama" and stem in ("attn_q", "attn_k"):
        heads = dims.heads if stem == "attn_q" else dims.kv_heads
        return partial(rotate_halves, heads=heads)
    if architecture == "gemma3" and stem.endswith("norm"):
        return _without_one
    return _unchanged


def rotate_halves(values: Values, heads: int) -> Values:
    """Undo llama.cpp's order of the rows of q and k.

    In a GGUF the rows of a head are interleaved, (0, d/2, 1, d/2 + 1, ...), so that rope turns
    neighbours. The checkpoint has them in two halves.

    Args:
        values: [heads * head_dim, ...].
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _without_one(values: Values) -> Values:
    return values - np.float32(1)


def _unchanged(values: Values) -> Values:
    return values
