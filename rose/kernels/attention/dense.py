"""Attention over dense groups of sequences, the building block of the torch back end.

Shape letters: N sequences of a group, L queries of each, M keys of each, H query heads, K key/value
heads, G query heads per key/value head, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SCORE_ELEMENTS = 1 << 24  # at most so many scores are held at once where sdpa cannot be used


def attend_dense(
    q_NLHD: Tensor,
    k_NMKD: Tensor,
    v_NMKD: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend with one call of scaled_dot_product_attention.

    Args:
        q_NLHD: queries [N, L, H, D].
        k_NMKD: keys [N, M, K, D]; K divides H.
        v_NMKD: values, as the keys.
        scale: factor of the scores.
        bias: added to the scores, [N or 1, 1, L, M] in the queries' dtype, or None.
        causal: query i sees keys 0 to i (only without a bias).

    Returns:
        [N, L, H, D] in the queries' dtype.
    """
    length, heads, kv_heads = q_NLHD.shape[1], q_NLHD.shape[2], k_NMKD.shape[2]
    k_NKMD, v_NKMD = k_NMKD.transpose(1, 2), v_NMKD.transpose(1, 2)
    if length == 1:  # the heads that share keys are as good as so many queries, and share the reads
        q_NKGD = q_NLHD.reshape(q_NLHD.shape[0], kv_heads, heads // kv_heads, -1)
        out_NKGD = F.scaled_dot_product_attention(
            q_NKGD, k_NKMD, v_NKMD, attn_mask=bias, scale=scale
        )
        return out_NKGD.reshape(q_NLHD.shape)
    out_NHLD = F.scaled_dot_product_attention(
        q_NLHD.transpose(1, 2),
        k_NKMD,
        v_NKMD,
        attn_mask=bias,
        is_causal=causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return out_NHLD.transpose(1, 2)


def attend_capped(
    q_NLHD: Tensor,
    k_NMKD: Tensor,
    v_NMKD: Tensor,
    *,
    scale: float,
    soft_cap: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend with scores s replaced by soft_cap * tanh(s / soft_cap), in float32.

    Arguments and result are those of `attend_dense`. Queries go in blocks, so that memory stays
    bounded at any length.
    """
    block = max(1, SCORE_ELEMENTS // max(1, q_NLHD.shape[0] * q_NLHD.shape[2] * k_NMKD.shape[1]))
    k_NKDM, v_NKMD = k_NMKD.float().permute(0, 2, 3, 1), v_NMKD.float().transpose(1, 2)
    k_NK1DM, v_NK1MD = k_NKDM.unsqueeze(2), v_NKMD.unsqueeze(2)
    parts = []
    for start in range(0, q_NLHD.shape[1], block):
        q_NLKGD = q_NLHD[:, start : start + block].float().unflatten(2, (k_NMKD.shape[2], -1))
        scores_NKGLM = (q_NLKGD.permute(0, 2, 3, 1, 4) * (scale / soft_cap)) @ k_NK1DM
        scores_NKGLM.tanh_().mul_(soft_cap)
        if bias is not None:
            scores_NKGLM += bias[:, :, start : start + block].unsqueeze(1)
        out_NKGLD = scores_NKGLM.softmax(-1) @ v_NK1MD
        parts.append(out_NKGLD.permute(0, 3, 1, 2, 4).flatten(2, 3))
    return torch.cat(parts, dim=1).to(q_NLHD.dtype)


def visibility_bias(
    query_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    first_keys: tuple[int, ...],
    shape: tuple[int, int],
    *,
    causal: bool,
    window: tuple[int | None, int | None],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Build the bias that hides what a query may not see: 0 where visible, -inf elsewhere.

    Args:
        query_lens: queries per sequence; the last of them is the sequence's last token.
        kv_lens: tokens per sequence, cached ones included.
        first_keys: position of the first key that is present, per sequence.
        shape: (L, M) of the group; shorter sequences are padded at the end.
        causal: hide later positions.
        window: positions visible to the (left, right), None for all.
        dtype: dtype of the result.
        device: device of the result.

    Returns:
        [N, 1, L, M]. A padded query sees what its sequence's last one does, so no row is all -inf.
    """
    facts = torch.tensor([query_lens, kv_lens, first_keys], device=device).unsqueeze(-1)
    query_N1, kv_N1, first_N1 = facts.unbind()
    row_L = torch.arange(shape[0], device=device)
    query_NL1 = (kv_N1 - query_N1 + torch.minimum(row_L, query_N1 - 1)).unsqueeze(-1)
    key_N1M = (first_N1 + torch.arange(shape[1], device=device)).unsqueeze(1)
    visible_NLM = (key_N1M < kv_N1.unsqueeze(1)).expand(-1, shape[0], -1)
    left, right = window
    right = 0 if causal else right
    if left is not None:
        visible_NLM = visible_NLM & (key_N1M >= query_NL1 - left)
    if right is not None:
        visible_NLM = visible_NLM & (key_N1M <= query_NL1 + right)
    bias_NLM = torch.zeros(visible_NLM.shape, dtype=dtype, device=device)
    return bias_NLM.masked_fill_(~visible_NLM, float("-inf")).unsqueeze(1)
