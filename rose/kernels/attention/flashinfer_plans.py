"""How FlashInfer's wrappers are made and planned for each kind of batch.

Shape letters: B sequences, P pages, S slots of a page, I page ids of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rose.kernels.attention import flashinfer_memory as memory
from rose.kernels.attention.base import AttentionSpec, PagedLayout

LAYOUT = "NHD"  # of keys and values: token, head, channel
CORE_GROUPS = (
    1,
    2,
    3,
)  # query heads of a key head that the decode kernel without tensor cores suits
Wrapper = Any  # one of FlashInfer's wrapper classes


class LayerKind(NamedTuple):
    """What a plan depends on; layers that agree in it share one."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    window_left: int  # -1 is unlimited
    soft_cap: float  # 0 is none
    dtype: torch.dtype

    def keywords(self) -> dict[str, Any]:
        """What every plan is told by name."""
        return {
            "window_left": self.window_left,
            "logits_soft_cap": self.soft_cap,
            "sm_scale": self.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


@lru_cache(maxsize=1024)
def kind_of(spec: AttentionSpec, dtype: torch.dtype) -> LayerKind:
    """Return the kind of a layer."""
    left = spec.window[0]
    return LayerKind(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.scale,
        spec.causal,
        -1 if left is None else left,
        spec.soft_cap or 0.0,
        dtype,
    )


class Facts(Protocol):
    """A batch on the host. All index tensors that a plan reads are int32 on the CPU."""

    @property
    def mode(self) -> str:
        """Which class of wrappers serves it."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Tokens and sequences."""
        ...

    def float_bytes(self, kind: LayerKind, sms: int, *, fixed: bool) -> int:
        """Return the float workspace that a plan may use."""
        ...

    def make(self, library: ModuleType, kernel: str, workspace: Tensor, *, fixed: bool) -> Wrapper:
        """Make a wrapper; with `fixed` it has buffers of its own, for batches of this size."""
        ...

    def plan(self, wrapper: Wrapper, kind: LayerKind) -> None:
        """Plan this batch for layers of a kind."""
        ...


@dataclass(frozen=True, slots=True)
class RaggedFacts:
    """Sequences without cached tokens; `indptr` is int32 [B + 1]."""

    indptr: Tensor
    device: torch.device
    mode: str = "ragged"

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "RaggedFacts":
        """Describe sequences of these lengths."""
        return cls(_indptr(lengths), device)

    @property
    def size(self) -> tuple[int, int]:
        """Tokens and sequences."""
        return int(self.indptr[-1]), len(self.indptr) - 1

    def float_bytes(self, kind: LayerKind, sms: int, *, fixed: bool) -> int:
        """Return the float workspace that a plan may use."""
        return _prefill_bytes(self.size, kind, sms, fixed=fixed)

    def make(self, library: ModuleType, kernel: str, workspace: Tensor, *, fixed: bool) -> Wrapper:
        """Make a wrapper."""
        buffers: dict[str, Any] = {}
        if fixed:
            names = ("qo_indptr_buf", "kv_indptr_buf")
            buffers = {name: torch.empty_like(self.indptr, device=self.device) for name in names}
            buffers["use_cuda_graph"] = True
        return library.BatchPrefillWithRaggedKVCacheWrapper(
            workspace, kv_layout=LAYOUT, backend=kernel, **buffers
        )

    def plan(self, wrapper: Wrapper, kind: LayerKind) -> None:
        """Plan this batch for layers of a kind."""
        wrapper.plan(
            self.indptr,
            self.indptr,
            kind.heads,
            kind.kv_heads,
            kind.head_dim,
            causal=kind.causal,
            **kind.keywords(),
        )


@dataclass(frozen=True, slots=True)
class PagedFacts:
    """New tokens of sequences whose keys and values lie in pages.

    On the host `qo_indptr` and `kv_indptr` int32 [B + 1], the latter counting pages, and
    `last_page_len` int32 [B]; on the device `indices` int32 [I], the sequences' pages one after
    another. `most_pages` bounds I in all batches of this size.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    page_size: int
    most_pages: int
    mode: str  # "decode": one new token per sequence; "prefill": any number

    @classmethod
    def of(cls, layout: PagedLayout, page_size: int, *, keep_empty: bool) -> "PagedFacts":
        """Describe a step; sequences without new tokens are left out unless they are kept."""
        rows = [i for i, count in enumerate(layout.query_lens) if count or keep_empty]
        queries = [layout.query_lens[i] for i in rows]
        kv_lens = [layout.kv_lens[i] for i in rows]
        pages = [-(-length // page_size) for length in kv_lens]
        last = [
            length - max(0, n - 1) * page_size for length, n in zip(kv_lens, pages, strict=True)
        ]
        return cls(
            qo_indptr=_indptr(queries),
            kv_indptr=_indptr(pages),
            indices=_page_ids(layout.block_table, rows, pages),
            last_page_len=torch.tensor(last, dtype=torch.int32),
            page_size=page_size,
            most_pages=layout.block_table.numel(),
            mode="decode" if set(queries) == {1} else "prefill",
        )

    @property
    def size(self) -> tuple[int, int]:
        """Tokens and sequences."""
        return int(self.qo_indptr[-1]), len(self.last_page_len)

    def float_bytes(self, kind: LayerKind, sms: int, *, fixed: bool) -> int:
        """Return the float workspace that a plan may use."""
        if self.mode == "decode":
            heads = (kind.heads, kind.kv_heads, kind.head_dim)
            return memory.decode_workspace_bytes(*heads, self.size[1], sms)
        return _prefill_bytes(self.size, kind, sms, fixed=fixed)

    def make(self, library: ModuleType, kernel: str, workspace: Tensor, *, fixed: bool) -> Wrapper:
        """Make a wrapper. Decode steps are left to FlashInfer's own decode kernels."""
        if self.mode == "prefill":
            return library.BatchPrefillWithPagedKVCacheWrapper(
                workspace, kv_layout=LAYOUT, backend=kernel, **self._buffers("buf", fixed)
            )
        return library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout=LAYOUT,
            use_tensor_cores=kernel == "tensor",
            **self._buffers("buffer", fixed),
        )

    def _buffers(self, suffix: str, fixed: bool) -> dict[str, Any]:
        if not fixed:
            return {}
        device = self.indices.device
        buffers: dict[str, Any] = {
            f"paged_kv_indptr_{suffix}": torch.empty_like(self.kv_indptr, device=device),
            f"paged_kv_indices_{suffix}": self.indices.new_empty(self.most_pages),
            f"paged_kv_last_page_len_{suffix}": torch.empty_like(self.last_page_len, device=device),
        }
        if self.mode == "prefill":
            buffers["qo_indptr_buf"] = torch.empty_like(self.qo_indptr, device=device)
        return {"use_cuda_graph": True} | buffers

    def plan(self, wrapper: Wrapper, kind: LayerKind) -> None:
        """Plan this step for layers of a kind."""
        pages = (self.kv_indptr, self.indices, self.last_page_len)
        shape = (kind.heads, kind.kv_heads, kind.head_dim, self.page_size)
        if self.mode == "prefill":
            wrapper.plan(self.qo_indptr, *pages, *shape, causal=kind.causal, **kind.keywords())
        else:
            wrapper.plan(*pages, *shape, **kind.keywords())


def _prefill_bytes(size: tuple[int, int], kind: LayerKind, sms: int, *, fixed: bool) -> int:
    heads = (kind.heads, kind.kv_heads, kind.head_dim)
    if fixed:
        return memory.float_workspace_bytes(*size, *heads, sms)
    return memory.eager_workspace_bytes(*heads, sms)


def _indptr(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def _page_ids(block_table: Tensor, rows: Sequence[int], pages: Sequence[int]) -> Tensor:
    """Gather the used entries of the block table: int32 [I], on its device."""
    counts = np.array(pages, np.int64)
    ends = np.cumsum(counts)
    first = np.array(rows, np.int64) * block_table.shape[1] - ends + counts
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first, counts)
    index = torch.from_numpy(places).to(block_table.device, non_blocking=True)
    return block_table.reshape(-1).index_select(0, index)
