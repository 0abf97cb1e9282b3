"""Paged attention that reads keys and values from the pages alone.

Shape letters: T tokens, H query heads, K key/value heads, D head size, P pages, S slots of a page.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from rose.kernels.attention.base import AttentionSpec, KVPages
from rose.kernels.kv_store import store_kv


class StoredAttention(ABC):
    """An `AttentionBatch` over pages that anyone may write the new tokens' keys and values into.

    So the kernel that norms and rotates the keys can write them, and `attend_stored` follows.
    """

    def __init__(self, pages: KVPages, slots_T: Tensor) -> None:
        """Attend over `pages`; `slots_T`, int64, is where the new tokens belong."""
        self.pages = pages
        self.slots_T = slots_T

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's pages, [P, S, K, D] each."""
        return self.pages.keys[layer], self.pages.values[layer]

    @abstractmethod
    def attend_stored(self, q_THD: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend after the new keys and values were written; returns [T, H, D]."""

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        """Write the new keys and values, then attend; returns [T, H, D]."""
        store_kv(k_TKD, v_TKD, *self.keys_and_values(spec.layer), self.slots_T)
        return self.attend_stored(q_THD, spec)
