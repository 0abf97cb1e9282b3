"""The attention contract: static facts of a layer, layouts of a batch, and what a back end does.

A back end plans once per forward pass (`plan_ragged` or `plan_paged`); the resulting
`AttentionBatch` then attends once per layer. Models see the `AttentionBatch` alone, so the same
model code runs without a KV cache (ragged) and with one (paged).

Shape letters: T tokens of the batch, H query heads, K key/value heads, D head size, B sequences,
P pages, S slots of a page, L layers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class PositionBias(Protocol):
    """What a model adds to the scores by the distance between query and key (MPNet, T5, ALiBi)."""

    def __call__(self, distance: "Tensor") -> "Tensor":
        """Return the bias of each head.

        Args:
            distance: position of the key minus that of the query, int64 of any shape.

        Returns:
            [H, *shape of distance], floating.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Static facts of one attention layer, taken from the model's config.

    `window` is (left, right): how many positions before and after its own a query sees, both
    inclusive; None is unlimited. A causal layer never looks right, whatever `window` says. `bias`
    is added to the scaled scores; layers that share one object share its values. The order is
    scale, `soft_cap`, `bias`, window.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    bias: PositionBias | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """Sequences packed without padding; keys and values live for this forward pass only.

    `cu_seqlens` is int32 [B + 1] on the batch's device; `lengths` are the same facts on the host.
    """

    cu_seqlens: "Tensor"
    lengths: tuple[int, ...]

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths, default=0)


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """New tokens of sequences whose earlier keys and values lie in pages.

    Host facts: `query_lens` new tokens per sequence, `kv_lens` tokens per sequence with the new
    ones. Device tensors: `cu_seqlens_q` int32 [B + 1], `block_table` int32 [B, max pages] (page
    ids, unused entries 0), `slot_mapping` int64 [T] (page * page size + offset, where each new
    token's key and value go; page 0 is reserved for padding).
    """

    cu_seqlens_q: "Tensor"
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_table: "Tensor"
    slot_mapping: "Tensor"

    @property
    def max_seqlen_q(self) -> int:
        """Most new tokens of one sequence."""
        return max(self.query_lens, default=0)

    @property
    def max_kv_len(self) -> int:
        """Length of the longest sequence, cached tokens included."""
        return max(self.kv_lens, default=0)


@dataclass(frozen=True, slots=True)
class KVPages:
    """The page pool: one key and one value tensor per layer, each [P, S, K, D]."""

    keys: "tuple[Tensor, ...]"
    values: "tuple[Tensor, ...]"

    @property
    def page_size(self) -> int:
        """Slots (tokens) of a page."""
        return self.keys[0].shape[1]

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the reserved page 0 included."""
        return self.keys[0].shape[0]


class AttentionBatch(Protocol):
    """One planned forward pass."""

    def attend(
        self, q_THD: "Tensor", k_TKD: "Tensor", v_TKD: "Tensor", spec: AttentionSpec
    ) -> "Tensor":
        """Attend with the new tokens' queries, keys and values; returns [T, H, D].

        A paged batch writes `k_TKD` and `v_TKD` into their pages first.
        """
        ...


class FixedBatch(AttentionBatch, Protocol):
    """Batches of one size, planned one after another into the same buffers, for a device graph.

    The caller owns the layout's device tensors and overwrites them in place for every batch. A
    graph is captured over `attend` after one run without it, which plans what each kind of layer
    needs and compiles kernels; `update` comes before every replay.
    """

    def update(self, layout: "RaggedLayout | PagedLayout") -> None:
        """Plan another batch of as many sequences and tokens; host work and copies only.

        Args:
            layout: the new host facts, and the same device tensors as ever, already overwritten.
        """
        ...


class GraphSupport(Enum):
    """Which batches of a back end can be captured in a device graph."""

    NONE = "none"
    DECODE = "decode"
    ALL = "all"


class AttentionBackend(ABC):
    """Computes attention over ragged and paged batches."""

    name: str
    graph_support: GraphSupport = GraphSupport.NONE

    @abstractmethod
    def unsupported(
        self, spec: AttentionSpec, dtype: "torch.dtype", device: "torch.device"
    ) -> list[str]:
        """Say why this back end cannot serve a layer; an empty list means that it can."""

    def unsupported_paged(
        self, spec: AttentionSpec, dtype: "torch.dtype", device: "torch.device", page_size: int
    ) -> list[str]:
        """Say why this back end cannot serve a layer whose keys and values lie in pages."""
        assert page_size > 0
        return self.unsupported(spec, dtype, device)

    def prepare(  # noqa: B027 - most need nothing
        self, specs: "Sequence[AttentionSpec]", dtype: "torch.dtype", *, paged: bool
    ) -> None:
        """Build what these layers need, which takes minutes with some libraries; may do nothing."""

    @abstractmethod
    def plan_ragged(self, layout: RaggedLayout) -> AttentionBatch:
        """Plan a batch without a KV cache."""

    @abstractmethod
    def plan_paged(self, layout: PagedLayout, pages: KVPages) -> AttentionBatch:
        """Plan a batch whose keys and values are read from and written to `pages`."""

    def fix_ragged(self, layout: RaggedLayout, max_seqlen: int) -> FixedBatch:
        """Plan batches of one size for a graph; for back ends whose `graph_support` is ALL.

        Args:
            layout: the first batch, padded to the size of all.
            max_seqlen: no sequence of any batch will be longer.
        """
        raise NotImplementedError(f"{self.name} has no graphs of ragged batches")

    def fix_paged(self, layout: PagedLayout, pages: KVPages, max_kv_len: int) -> FixedBatch:
        """Plan steps of one size for a graph; for back ends whose `graph_support` is not NONE.

        With DECODE every sequence has one new token.

        Args:
            layout: the first step, padded to the size of all; the block table's width bounds the
                pages of a sequence in every step.
            pages: the page pool.
            max_kv_len: no sequence of any step will be longer.
        """
        raise NotImplementedError(f"{self.name} has no graphs of paged batches")
