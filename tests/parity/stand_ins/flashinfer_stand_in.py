"""A stand-in for FlashInfer 0.6.11: its checks and its call order, with torch for the kernels.

What it holds callers to, beyond shapes and dtypes: a plan before every run; index tensors of plans
on the host, since others make the host wait; in graph mode fixed buffers, a fixed number of
sequences, and no more rows than in the first plan; workspaces as large as the scheduler asks for;
and no second plan in a wrapper before the device has copied the first from the staging buffer.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.parity.stand_ins.attention import (
    attend_packed,
    is_heads,
    is_index,
    is_indptr,
    read_pages,
)

SMS = 132
HEAD_DIMS = (64, 128, 256)
_staged: "list[_Wrapper]" = []  # planned since the last event, in order
_capturing = False


class Event:
    """Stands for a CUDA event: once waited for, the plans before it have been copied."""

    def __init__(self) -> None:
        self._before: list[_Wrapper] = []

    def record(self) -> None:
        self._before = list(_staged)
        _staged.clear()

    def synchronize(self) -> None:
        for wrapper in self._before:
            wrapper.staging_busy = False


@contextmanager
def capturing() -> Iterator[None]:
    """As while a graph is captured: nothing may be planned."""
    global _capturing
    _capturing = True
    try:
        yield
    finally:
        _capturing = False


def query_tile(packed_len: int, head_dim: int) -> int:
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, use_cuda_graph: bool):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.workspace = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self.int_bytes = 8 << 20
        self.graph = use_cuda_graph
        self.staging_busy = False
        self.planned = False
        self.max_rows: int | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor):
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self.workspace, self.int_bytes = float_workspace_buffer, int_workspace_buffer.numel()

    def _begin(self, heads: int, kv_heads: int, dim: int, facts: dict[str, object]) -> None:
        assert not _capturing, "a plan within a capture"
        assert not self.staging_busy, "a second plan before the first was copied to the device"
        assert heads % kv_heads == 0
        assert dim in HEAD_DIMS, f"head size {dim}"
        assert facts["q_data_type"] in (torch.float16, torch.bfloat16)
        assert facts["kv_data_type"] == facts["q_data_type"]
        assert isinstance(facts["window_left"], int)
        assert facts["window_left"] >= -1
        assert facts["logits_soft_cap"] is None or facts["logits_soft_cap"] >= 0
        self.heads, self.kv_heads, self.dim, self.facts = heads, kv_heads, dim, facts
        self.staging_busy = self.planned = True
        _staged.append(self)

    def _fix(self, batch: int, fixed: int, rows: int) -> None:
        if not self.graph:
            return
        assert batch == fixed, f"{batch} sequences in a graph of {fixed}"
        self.max_rows = rows if self.max_rows is None else self.max_rows
        assert rows <= self.max_rows, "more rows than in the first plan"

    def _needs(self, rows: int, batch: int, kernel: str) -> None:
        """Check the workspaces against what the scheduler allocates for the largest batch."""
        group = self.heads // self.kv_heads
        tile = query_tile(max(1, rows - batch + 1) * group, self.dim)
        tiles = max(2 * SMS // self.kv_heads, math.ceil(rows * group / tile) + batch - 1)
        floats = self.heads * tiles * tile * (self.dim + 1) * 4 if kernel == "fa2" else 0
        assert self.workspace.numel() >= floats, f"{floats} bytes of float workspace are needed"
        works = (math.ceil(rows / 128) + batch - 1) * self.heads
        ints = 4 * 7 * works if kernel == "fa3" else 4 * (3 * tiles + rows + batch) + tiles
        assert self.int_bytes >= ints, f"{ints} bytes of int workspace are needed"

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], starts: list[int]):
        scale = self.facts["sm_scale"]
        return attend_packed(
            q,
            keys,
            values,
            starts,
            scale=self.dim**-0.5 if scale is None else scale,
            causal=self.facts.get("causal", False),
            left=self.facts["window_left"],
            right=-1,
            soft_cap=self.facts["logits_soft_cap"] or 0.0,
        )


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        kv_indptr_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        assert backend in ("fa2", "fa3")
        self.backend = backend
        if use_cuda_graph:
            self.fixed = len(qo_indptr_buf) - 1
            is_index(qo_indptr_buf, self.fixed + 1, device=self.device.type)
            is_index(kv_indptr_buf, self.fixed + 1, device=self.device.type)
            self.buffer = qo_indptr_buf

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        starts = is_indptr(qo_indptr, device="cpu")
        assert is_indptr(kv_indptr, device="cpu") == starts
        assert len(starts) > 1, "a batch without sequences cannot be planned"
        facts = {"causal": causal, "window_left": window_left, "sm_scale": sm_scale}
        facts |= {"logits_soft_cap": logits_soft_cap}
        facts |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._begin(num_qo_heads, num_kv_heads, head_dim_qk, facts)
        if self.graph:
            self._fix(len(starts) - 1, self.fixed, starts[-1])
            self._needs(self.max_rows, len(starts) - 1, self.backend)
            self.buffer.copy_(qo_indptr)
        self.starts = starts

    def run(self, q, k, v, *, out=None, lse=None, return_lse=False):
        assert self.planned, "run before plan"
        tokens, dtype = self.starts[-1], self.facts["q_data_type"]
        is_heads(q, tokens, self.heads, self.dim, dtype)
        is_heads(k, tokens, self.kv_heads, self.dim, dtype)
        is_heads(v, tokens, self.kv_heads, self.dim, dtype)
        counts = [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]
        return self._attend(q, list(k.split(counts)), list(v.split(counts)), self.starts)


class _Paged(_Wrapper):
    def _plan_pages(self, starts: list[int], indptr, indices, last_page_len, page_size: int):
        assert page_size >= 1
        self.page_starts = is_indptr(indptr, len(starts) - 1, device="cpu")
        is_index(last_page_len, len(starts) - 1, device="cpu")
        is_index(indices, self.page_starts[-1])
        pages = [b - a for a, b in zip(self.page_starts, self.page_starts[1:], strict=False)]
        last = last_page_len.tolist()
        assert all(1 <= n <= page_size for n, count in zip(last, pages, strict=True) if count)
        self.lengths = [max(0, n - 1) * page_size + m for n, m in zip(pages, last, strict=True)]
        self.starts, self.page_size, self.ids = starts, page_size, indices.tolist()

    def _check_buffers(self, indptr, indices, last_page_len) -> None:
        self.fixed = len(last_page_len)
        is_index(indptr, self.fixed + 1, device=self.device.type)
        is_index(indices, len(indices), device=self.device.type)
        is_index(last_page_len, self.fixed, device=self.device.type)
        self.indices_buffer = indices

    def _fill_buffers(self, indices) -> None:
        assert len(indices) <= len(self.indices_buffer), "more pages than the buffer holds"

    def _run(self, q, paged_kv_cache):
        assert self.planned, "run before plan"
        keys, values = paged_kv_cache
        dtype = self.facts["q_data_type"]
        is_heads(q, self.starts[-1], self.heads, self.dim, dtype)
        for pages in (keys, values):
            assert tuple(pages.shape[1:]) == (self.page_size, self.kv_heads, self.dim)
            assert pages.dtype == dtype
        rows = range(len(self.lengths))
        ids = [self.ids[self.page_starts[i] : self.page_starts[i + 1]] for i in rows]
        parts = [
            [read_pages(pages, ids[i], self.lengths[i]) for i in rows] for pages in (keys, values)
        ]
        return self._attend(q, *parts, self.starts)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        assert backend in ("fa2", "fa3")
        self.backend = backend
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
            self._check_buffers(*buffers)
            is_index(qo_indptr_buf, self.fixed + 1, device=self.device.type)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        starts = is_indptr(qo_indptr, device="cpu")
        assert len(starts) > 1, "a batch without sequences cannot be planned"
        facts = {"causal": causal, "window_left": window_left, "sm_scale": sm_scale}
        facts |= {"logits_soft_cap": logits_soft_cap}
        facts |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._begin(num_qo_heads, num_kv_heads, head_dim_qk, facts)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan_pages(starts, *pages, page_size)
        if self.graph:
            self._fix(len(starts) - 1, self.fixed, starts[-1])
            self._needs(self.max_rows, len(starts) - 1, self.backend)
            self._fill_buffers(paged_kv_indices)

    def run(self, q, paged_kv_cache, *, out=None, lse=None, return_lse=False):
        return self._run(q, paged_kv_cache)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        assert not float_workspace_buffer.any(), "zeros are needed for the first use"
        self.tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self._check_buffers(
                paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            )

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
    ):
        if not self.tensor_cores:
            groups = (1, 2, 3, 4, 8)
            assert num_qo_heads // num_kv_heads in groups, "such a group needs tensor cores"
        facts = {"window_left": window_left, "logits_soft_cap": logits_soft_cap}
        facts |= {"sm_scale": sm_scale, "q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._begin(num_qo_heads, num_kv_heads, head_dim, facts)
        batch = len(last_page_len)
        self._plan_pages(list(range(batch + 1)), indptr, indices, last_page_len, page_size)
        if self.graph:
            self._fix(batch, self.fixed, batch)
            self._needs(batch, batch, "fa2" if self.tensor_cores else "cores")
            self._fill_buffers(indices)

    def run(self, q, paged_kv_cache, *, out=None, lse=None, return_lse=False):
        return self._run(q, paged_kv_cache)
