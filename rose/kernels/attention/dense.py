"""Attention over dense groups of equally long sequences, the building block of the torch back end.

Shape letters: N sequences of a group, L queries of each, M keys of each, H query heads, K key/value
heads, G query heads per key/value head, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.attention.base import PositionBias
from rose.kernels.attention.grouping import Group

SCORE_ELEMENTS = 1 << 24  # at most so many scores, or biases of scores, are held at once
WINDOW_BLOCK = 128  # queries that share one slice of the keys where a window is narrow


def attend_dense(
    q_NLHD: Tensor,
    k_NMKD: Tensor,
    v_NMKD: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend: softmax(scale * q k + bias) v, with scores capped before the bias where asked for.

    Args:
        q_NLHD: queries [N, L, H, D].
        k_NMKD: keys [N, M, K, D]; K divides H.
        v_NMKD: values, as the keys.
        scale: factor of the scores.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
        bias: [N or 1, H or 1, L, M] in the queries' dtype, -inf where a key is not visible; with
            a soft cap [N or 1, 1, L, M].
        causal: query i sees keys 0 to i; without bias and soft cap only.

    Returns:
        [N, L, H, D] in the queries' dtype.
    """
    if soft_cap is not None:
        assert not causal, "a capped layer hides later keys by its bias"
        return _attend_capped(q_NLHD, k_NMKD, v_NMKD, scale, soft_cap, bias)
    heads, kv_heads = q_NLHD.shape[2], k_NMKD.shape[2]
    k_NKMD, v_NKMD = k_NMKD.transpose(1, 2), v_NMKD.transpose(1, 2)
    if q_NLHD.shape[1] == 1:  # heads that share keys are as good as so many queries: one read
        q_NKGD = q_NLHD.reshape(-1, kv_heads, heads // kv_heads, q_NLHD.shape[3])
        if bias is not None and bias.shape[1] > 1:
            bias = bias.reshape(-1, kv_heads, heads // kv_heads, bias.shape[3])
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


def _attend_capped(
    q_NLHD: Tensor,
    k_NMKD: Tensor,
    v_NMKD: Tensor,
    scale: float,
    soft_cap: float,
    bias: Tensor | None,
) -> Tensor:
    """Attend with capped scores in float32, in blocks of queries so that memory stays bounded."""
    block = max(1, SCORE_ELEMENTS // max(1, q_NLHD.shape[0] * q_NLHD.shape[2] * k_NMKD.shape[1]))
    k_NK1DM = k_NMKD.float().permute(0, 2, 3, 1).unsqueeze(2)
    v_NK1MD = v_NMKD.float().transpose(1, 2).unsqueeze(2)
    parts = []
    for start in range(0, q_NLHD.shape[1], block):
        q_NLKGD = q_NLHD[:, start : start + block].float().unflatten(2, (k_NMKD.shape[2], -1))
        scores_NKGLM = (q_NLKGD.permute(0, 2, 3, 1, 4) * (scale / soft_cap)) @ k_NK1DM
        scores_NKGLM = scores_NKGLM.tanh_().mul_(soft_cap)
        if bias is not None:
            scores_NKGLM += bias[:, :, start : start + block].unsqueeze(1)
        out_NKGLD = scores_NKGLM.softmax(-1) @ v_NK1MD
        parts.append(out_NKGLD.permute(0, 3, 1, 2, 4).flatten(2, 3))
    return torch.cat(parts, dim=1).to(q_NLHD.dtype)


def attend_windowed(
    q_NLHD: Tensor,
    k_NLKD: Tensor,
    v_NLKD: Tensor,
    band: Tensor,
    window: tuple[int, int],
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """Attend within a window, block of queries by block, each over the keys that it can see.

    The work grows with L times the window instead of L squared.

    Args:
        q_NLHD: queries [N, L, H, D].
        k_NLKD: keys [N, L, K, D].
        v_NLKD: values, as the keys.
        band: what `band_bias` gives for this length and window.
        window: positions that a query sees to its (left, right).
        scale: factor of the scores.
        soft_cap: as in `attend_dense`.

    Returns:
        [N, L, H, D] in the queries' dtype.
    """
    left, right = window
    length, block = q_NLHD.shape[1], band.shape[0]
    parts = []
    for start in range(0, length, block):
        end = min(start + block, length)
        first, last = max(0, start - left), min(length, end + right)
        # Column 0 of the band is the key `left` places before the block's first query.
        columns = slice(first - start + left, last - start + left)
        out_NLHD = attend_dense(
            q_NLHD[:, start:end],
            k_NLKD[:, first:last],
            v_NLKD[:, first:last],
            scale=scale,
            soft_cap=soft_cap,
            bias=band[None, None, : end - start, columns],
        )
        parts.append(out_NLHD)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def band_bias(
    length: int, window: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Build the bias of one block of queries: 0 within the window of each, -inf elsewhere.

    Returns:
        [block, left + block + right]: column j is the key at j - left from the block's first query.
        The block is the whole length where cutting it would not pay.
    """
    left, right = window
    block = length if length <= 2 * WINDOW_BLOCK else WINDOW_BLOCK
    key = torch.arange(left + block + right, device=device) - left
    distance = key - torch.arange(block, device=device).unsqueeze(1)
    hidden = (distance < -left) | (distance > right)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def ragged_distance(
    group: Group,
    first_keys: tuple[int, ...] | None,
    device: torch.device,
    rows: range | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the distances of keys from queries in a group of unlike sequences.

    Args:
        group: the sequences; a sequence's last query is its last token.
        first_keys: position of the first key that is present, per sequence; None is all 0.
        device: device of the result.
        rows: which of the queries, side by side; None is all L.

    Returns:
        Position of the key minus that of the query, int64 [N, L, M], and which keys are padding,
        bool [N, 1, M]. A padded query stands where its sequence's last one does.
    """
    first_keys = first_keys or (0,) * len(group.members)
    count = max(kv - first for kv, first in zip(group.kv_lens, first_keys, strict=True))
    facts = torch.tensor([group.query_lens, group.kv_lens, first_keys], device=device)
    query_N1, kv_N1, first_N1 = facts.unsqueeze(-1).unbind()
    rows = rows or range(group.shape[0])
    row_L = torch.arange(rows.start, rows.stop, device=device)
    query_NL1 = (kv_N1 - query_N1 + torch.minimum(row_L, query_N1 - 1)).unsqueeze(-1)
    key_N1M = (first_N1 + torch.arange(count, device=device)).unsqueeze(1)
    return key_N1M - query_NL1, key_N1M >= kv_N1.unsqueeze(1)


def ragged_bias(
    group: Group,
    first_keys: tuple[int, ...] | None,
    window: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    position_bias: PositionBias | None = None,
    rows: range | None = None,
) -> Tensor:
    """Build the bias of a group of sequences: -inf where a key is not visible, else 0.

    Args:
        group: the sequences; a sequence's last query is its last token.
        first_keys: position of the first key that is present, per sequence; None is all 0.
        window: positions that a query sees to its (left, right).
        dtype: dtype of the result.
        device: device of the result.
        position_bias: what visible keys get instead of 0.
        rows: which of the queries, side by side; None is all L.

    Returns:
        [N, 1, L, M], with `position_bias` [N, H, L, M]. A padded query sees what its sequence's
        last one does, so no row is all -inf.
    """
    distance_NLM, padding_N1M = ragged_distance(group, first_keys, device, rows)
    hidden_NLM = (distance_NLM > window[1]) | (distance_NLM < -window[0]) | padding_N1M
    hidden_N1LM = hidden_NLM.unsqueeze(1)
    if position_bias is not None:
        bias_NHLM = position_bias(distance_NLM).to(dtype).transpose(0, 1)
        return bias_NHLM.masked_fill(hidden_N1LM, float("-inf"))
    bias_N1LM = torch.zeros(hidden_N1LM.shape, dtype=dtype, device=device)
    return bias_N1LM.masked_fill_(hidden_N1LM, float("-inf"))
