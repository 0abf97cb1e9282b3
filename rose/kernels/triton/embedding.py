"""Token embeddings of the BERT family in one kernel: gather, sum, layer norm.

Shape letters: T tokens, C channels, V words, P positions, K segments.
"""

import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.triton.launch import MAX_CHANNELS, covers, row_blocks


@triton.jit
def embed_kernel(
    out, ids, positions, types, words, places, segments, weight, bias, num_tokens, eps,
    C: tl.constexpr, TYPES: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write layer_norm(words[ids] + segments[types] + places[positions]) for BLOCK_T tokens."""
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_C)[None, :]
    real = token < num_tokens
    inside = real[:, None] & (channel < C)
    word = tl.load(ids + token, mask=real, other=0)[:, None] * C
    place = tl.load(positions + token, mask=real, other=0)[:, None] * C
    segment = tl.zeros_like(word)
    if TYPES:
        segment = tl.load(types + token, mask=real, other=0)[:, None] * C
    x_TC = tl.load(words + word + channel, mask=inside, other=0.0).to(tl.float32)
    x_TC += tl.load(segments + segment + channel, mask=inside, other=0.0).to(tl.float32)
    x_TC = x_TC.to(dtype).to(tl.float32)  # the torch version rounds each sum
    x_TC += tl.load(places + place + channel, mask=inside, other=0.0).to(tl.float32)
    x_TC = x_TC.to(dtype).to(tl.float32)
    mean_T = tl.sum(x_TC, 1) / C
    x_TC = tl.where(inside, x_TC - mean_T[:, None], 0.0)
    scale_T = tl.rsqrt(tl.sum(x_TC * x_TC, 1) / C + eps)
    x_TC = x_TC * scale_T[:, None] * tl.load(weight + channel, mask=channel < C, other=0.0)
    if BIAS:
        x_TC += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * C + channel, x_TC.to(dtype), mask=inside)


def embed_and_norm(
    ids_T: Tensor,
    positions_T: Tensor,
    types_T: Tensor | None,
    words_VC: Tensor,
    positions_PC: Tensor,
    types_KC: Tensor,
    weight_C: Tensor,
    bias_C: Tensor | None,
    eps: float,
) -> Tensor | None:
    """Return what `rose.kernels.embedding.embed_and_norm` does, or None for other dtypes."""
    channels = words_VC.shape[1]
    if channels > MAX_CHANNELS:
        return None
    if not covers(words_VC, positions_PC, types_KC, weight_C, bias_C):
        return None
    tokens = ids_T.shape[0]
    out_TC = words_VC.new_empty((tokens, channels))
    block_T, block_C, warps = row_blocks(channels)
    if tokens:
        embed_kernel[(triton.cdiv(tokens, block_T),)](
            out_TC, ids_T, positions_T, ids_T if types_T is None else types_T,
            words_VC, positions_PC, types_KC, weight_C, weight_C if bias_C is None else bias_C,
            tokens, eps, C=channels, TYPES=types_T is not None, BIAS=bias_C is not None,
            BLOCK_T=block_T, BLOCK_C=block_C, num_warps=warps,
        )  # fmt: skip
    return out_TC
