"""Memory for packed weights: large blocks on huge pages, which fewer misses of the TLB slow down.

Tensors are cut from blocks one after another; a block lives as long as one of its tensors.
"""

import ctypes
import sys
import threading

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
BLOCK = 32 << 20
ALIGNMENT = 64  # bytes, a cache line
MADV_HUGEPAGE = 14

_lock = threading.Lock()
_rest = torch.empty(0)  # of the block that tensors are cut from


def empty(floats: int) -> Tensor:
    """Return uninitialised float32 [floats], aligned to cache lines."""
    global _rest
    rounded = -(-floats * 4 // ALIGNMENT) * ALIGNMENT // 4
    with _lock:
        if rounded > _rest.shape[0]:
            _rest = _block(max(rounded, BLOCK // 4))
        tensor, _rest = _rest[:floats], _rest[rounded:]
    return tensor


def _block(floats: int) -> Tensor:
    """Return at least `floats` on huge pages, where the system has them."""
    size = -(-floats * 4 // HUGE_PAGE) * HUGE_PAGE
    with torch.inference_mode(False):  # whoever asks first: later ones may be outside of it
        memory = torch.empty((size + HUGE_PAGE) // 4)
    skipped = -memory.data_ptr() % HUGE_PAGE
    block = memory[skipped // 4 : (skipped + size) // 4]
    if sys.platform == "linux":  # a wish: what it answers changes nothing
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return block
