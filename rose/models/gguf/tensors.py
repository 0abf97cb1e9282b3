"""Which tensor of a GGUF file becomes which tensor of a checkpoint, and what changes on the way."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rose.models.gguf.config import rope_tensors
from rose.models.gguf.dimensions import Dimensions
from rose.models.gguf.families import FAMILIES, Family
from rose.models.gguf.reader import GgufFile

Values = NDArray[np.float32]


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write: `target` [shape] is `change` of the tensor `source` of the GGUF.

    With an `index` it is of that part of the source's first dimension alone.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    change: Callable[[Values], Values]
    index: int | None = None


def bias_flags(gguf: GgufFile) -> dict[str, bool]:
    """The config's flags for biases, read from which tensors the first layer has."""
    flags = FAMILIES[gguf.architecture].biases
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
    family = FAMILIES[gguf.architecture]
    plans: list[TensorPlan] = []
    for entry in _entries(gguf, family, dims, tied=tied):
        plans += _plan(gguf, family, dims, *entry)
    known = {plan.source for plan in plans} | rope_tensors(gguf)
    if tied and not family.is_encoder:
        known.add("output.weight")
    if unknown := sorted(gguf.tensors.keys() - known):
        raise gguf.error(
            f"tensor {unknown[0]!r} has no place in a {gguf.architecture} model"
            + (f" (nor have {len(unknown) - 1} more)" if len(unknown) > 1 else "")
        )
    return plans


def _entries(
    gguf: GgufFile, family: Family, dims: Dimensions, *, tied: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield (source, target, shape letters) of every tensor that the architecture wants."""
    layer = dict(family.layer)
    for flag, present in bias_flags(gguf).items():
        layer |= family.biases[flag] if present else {}
    for source, (target, letters) in (family.top if tied else family.top | family.head).items():
        yield source, target, letters
    for i in range(dims.layers):
        for source, (target, letters) in layer.items():
            if i > 0 or source not in family.not_in_first:
                yield f"blk.{i}.{source}", f"{family.layers}.{i}.{target}", letters


def _plan(
    gguf: GgufFile, family: Family, dims: Dimensions, source: str, target: str, letters: str
) -> list[TensorPlan]:
    if source not in gguf.tensors:
        raise gguf.error(f"has no tensor {source!r}, which a {gguf.architecture} model needs")
    shape = tuple(dims.size(letter) for letter in letters)
    if gguf.shape(source) != shape:
        found = gguf.shape(source)
        raise gguf.error(f"tensor {source!r} has shape {found}, but the metadata say {shape}")
    change = _change(family, source, dims)
    if "{expert}" not in target:
        return [TensorPlan(source, target, shape, change)]
    return [
        TensorPlan(source, target.format(expert=index), shape[1:], change, index)
        for index in range(dims.experts)
    ]


def _change(family: Family, source: str, dims: Dimensions) -> Callable[[Values], Values]:
    stem = source.split(".")[-2]
    if family.turned and stem in ("attn_q", "attn_k"):
        heads = dims.heads if stem == "attn_q" else dims.kv_heads
        return partial(rotate_halves, heads=heads)
    if family.norms_above_one and stem.endswith("norm"):
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
