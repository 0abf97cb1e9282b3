"""Stand-ins for the functions of FlashAttention 2, 3 and 4 and of torch's own copy of 2.

Each has the parameters of its version, checks shapes and dtypes, and computes with torch.
"""

# ruff: noqa: ARG004 - parameters are those of the library

from itertools import pairwise

import torch
from torch import Tensor

from tests.parity.stand_ins.attention import (
    attend_packed,
    is_heads,
    is_index,
    is_indptr,
    read_pages,
)


def _side(side: int | None) -> int:
    return -1 if side is None else side


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_q: Tensor,
    lengths: list[int],
    cu_k: Tensor | None,
    table: Tensor | None,
    bounds: tuple[int | None, int | None],
    scale: float | None,
    causal: bool,
    window: tuple[int | None, int | None],
    soft_cap: float,
) -> Tensor:
    """Check what all versions ask for, and attend."""
    starts = is_indptr(cu_q, len(lengths), device=q.device.type)
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
    assert q.shape[1] % k.shape[-2] == 0
    is_heads(q, starts[-1], q.shape[1], q.shape[2], q.dtype)
    most = max(b - a for a, b in pairwise(starts))
    assert bounds[0] is not None
    assert most <= bounds[0], f"{most} queries, the bound is {bounds[0]}"
    assert bounds[1] is None or max(lengths) <= bounds[1]
    if table is None:
        places = is_indptr(cu_k, len(lengths), device=q.device.type)
        for x in (k, v):
            is_heads(x, places[-1], k.shape[1], q.shape[2], q.dtype)
        keys, values = (list(x.split(lengths)) for x in (k, v))
    else:
        is_index(table, len(lengths), table.shape[1], device=q.device.type)
        size = k.shape[1]
        assert max(lengths) <= table.shape[1] * size
        assert k.dtype == v.dtype == q.dtype
        ids = [row[: -(-n // size)] for row, n in zip(table.tolist(), lengths, strict=True)]
        keys, values = (
            [read_pages(x, one, n) for one, n in zip(ids, lengths, strict=True)] for x in (k, v)
        )
    return attend_packed(
        q,
        keys,
        values,
        starts,
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        causal=causal,
        left=_side(window[0]),
        right=_side(window[1]),
        soft_cap=soft_cap,
    )


class flash_attn:  # noqa: N801 - named as the module that it stands for
    """Version 2.8."""

    @staticmethod
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert dropout_p == 0
        assert all(isinstance(side, int) for side in window_size)
        if block_table is not None:
            assert k.shape[1] % 256 == 0, f"pages of {k.shape[1]} tokens"
        return _attend(
            q,
            k,
            v,
            cu_q=cu_seqlens_q,
            lengths=cu_seqlens_k.diff().tolist(),
            cu_k=cu_seqlens_k,
            table=block_table,
            bounds=(max_seqlen_q, max_seqlen_k),
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            soft_cap=softcap,
        )


class flash_attn_interface:  # noqa: N801 - named as the module that it stands for
    """Version 3."""

    @staticmethod
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        qv=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        sm_margin=0,
        return_attn_probs=False,
    ):
        return _attend(
            q,
            k,
            v,
            cu_q=cu_seqlens_q,
            lengths=cu_seqlens_k.diff().tolist(),
            cu_k=cu_seqlens_k,
            table=None,
            bounds=(max_seqlen_q, max_seqlen_k),
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            soft_cap=softcap,
        )

    @staticmethod
    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        is_index(cache_seqlens, len(cu_seqlens_q) - 1, device=q.device.type)
        return _attend(
            q,
            k_cache,
            v_cache,
            cu_q=cu_seqlens_q,
            lengths=cache_seqlens.tolist(),
            cu_k=None,
            table=page_table,
            bounds=(max_seqlen_q, None),
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            soft_cap=softcap,
        )


class flash_attn_cute:  # noqa: N801 - stands for flash_attn.cute
    """Version 4: always returns statistics beside the output."""

    @staticmethod
    def flash_attn_varlen_func(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        min_seqlen_k=None,
        seqused_q=None,
        seqused_k=None,
        gather_kv_indices=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(None, None),
        learnable_sink=None,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
    ):
        assert (page_table is None) != (cu_seqlens_k is None), "pages go with seqused_k alone"
        assert all(side is None or side >= 0 for side in window_size)
        if page_table is not None:
            is_index(seqused_k, len(cu_seqlens_q) - 1, device=q.device.type)
        lengths = (cu_seqlens_k.diff() if page_table is None else seqused_k).tolist()
        out = _attend(
            q,
            k,
            v,
            cu_q=cu_seqlens_q,
            lengths=lengths,
            cu_k=cu_seqlens_k,
            table=page_table,
            bounds=(max_seqlen_q, max_seqlen_k),
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            soft_cap=softcap,
        )
        return out, None


class torch_operators:  # noqa: N801 - stands for torch.ops.aten
    """torch's operator, which has no soft cap."""

    @staticmethod
    def _flash_attention_forward(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        *,
        scale=None,
        window_size_left=None,
        window_size_right=None,
    ):
        assert dropout_p == 0
        assert return_debug_mask is False
        out = _attend(
            query,
            key,
            value,
            cu_q=cum_seq_q,
            lengths=cum_seq_k.diff().tolist(),
            cu_k=cum_seq_k,
            table=None,
            bounds=(max_q, max_k),
            scale=scale,
            causal=is_causal,
            window=(window_size_left, window_size_right),
            soft_cap=0.0,
        )
        return out, None, None, None, None
