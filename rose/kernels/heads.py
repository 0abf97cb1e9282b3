"""Heads of one attention layer: norm per head, rotation, the way into the KV pages, attention.

`attend_heads` is what models call. Where the attention keeps keys and values in pages and reads
them from there alone, one kernel norms, rotates and writes; otherwise the same steps are done one
after another.

Shape letters: T tokens, H query heads, K key/value heads, D head size, R rotary channels, P pages,
S slots of a page.
"""

from typing import NamedTuple

from torch import Tensor

from rose.kernels.attention.base import AttentionBatch, AttentionSpec
from rose.kernels.attention.stored import StoredAttention
from rose.kernels.dispatch import operation
from rose.kernels.kv_store import store_kv
from rose.kernels.norm import rms_norm
from rose.kernels.rope import apply_rope

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, R] each


class HeadNorms(NamedTuple):
    """RMS norms over the channels of each query head and each key head, before the rotation."""

    q_weight: Tensor  # [D]
    k_weight: Tensor  # [D]
    eps: float
    weight_offset: float = 0.0


@operation
def norm_and_rotate(
    q_THD: Tensor, k_TKD: Tensor, rotation: Rotation, norms: HeadNorms | None
) -> tuple[Tensor, Tensor]:
    """Norm the heads where there are norms, then rotate them; returns new queries and keys."""
    if norms is not None:
        eps, offset = norms.eps, norms.weight_offset
        q_THD = rms_norm(q_THD, norms.q_weight, eps, weight_offset=offset)
        k_TKD = rms_norm(k_TKD, norms.k_weight, eps, weight_offset=offset)
    return apply_rope(q_THD, k_TKD, *rotation)


@operation
def norm_rotate_and_store(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    keys_PSKD: Tensor,
    values_PSKD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Do `norm_and_rotate` and `store_kv` at once; returns the queries."""
    q_THD, k_TKD = norm_and_rotate.reference(q_THD, k_TKD, rotation, norms)
    store_kv.reference(k_TKD, v_TKD, keys_PSKD, values_PSKD, slots_T)
    return q_THD


def attend_heads(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    attention: AttentionBatch,
    spec: AttentionSpec,
) -> Tensor:
    """Norm and rotate queries and keys, keep what has to be kept, and attend.

    Args:
        q_THD: queries as the projection gave them, [T, H, D]; views of a fused result will do.
        k_TKD: keys, [T, K, D].
        v_TKD: values, [T, K, D].
        rotation: float32 cosines and sines of the tokens' positions.
        norms: norms of the heads, None where the model has none.
        attention: the batch's plan.
        spec: facts of the layer.

    Returns:
        [T, H, D].
    """
    if isinstance(attention, StoredAttention):
        pages = attention.keys_and_values(spec.layer)
        q_THD = norm_rotate_and_store(
            q_THD, k_TKD, v_TKD, rotation, norms, *pages, attention.slots_T
        )
        return attention.attend_stored(q_THD, spec)
    q_THD, k_TKD = norm_and_rotate(q_THD, k_TKD, rotation, norms)
    return attention.attend(q_THD, k_TKD, v_TKD, spec)
