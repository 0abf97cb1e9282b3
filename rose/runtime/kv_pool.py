"""The tensors of the page pool, and how many pages a machine has room for."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rose.kernels.attention.base import AttentionSpec, KVPages

CPU_SHARE = 0.25  # of the memory that is available once the weights are loaded
GPU_SHARE = 0.9  # of the memory that is free once the weights are loaded


def page_bytes(specs: Sequence[AttentionSpec], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page: keys and values of `page_size` tokens in all layers."""
    channels = sum(spec.num_kv_heads * spec.head_dim for spec in specs)
    return 2 * page_size * channels * dtype.itemsize


def allocate_pages(
    specs: Sequence[AttentionSpec],
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVPages:
    """Allocate the pool, all zero.

    Kernels may load slots beyond a sequence's end and weigh them with 0, which a NaN there would
    survive: every slot has to be finite from the start.
    """

    def zeros(spec: AttentionSpec) -> torch.Tensor:
        shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        return allocate_zeros(shape, dtype, device)

    return KVPages(tuple(zeros(spec) for spec in specs), tuple(zeros(spec) for spec in specs))


def allocate_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate a part of a pool.

    On a CPU numpy's zeros are memory that the system hands out when it is first written, so a large
    pool costs nothing before it is used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def choose_num_pages(
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    *,
    page_size: int,
    max_num_seqs: int,
    max_model_len: int,
    cache_bytes: int | None = None,
    state_bytes: int = 0,
) -> int:
    """Return the size of the pool in pages, the reserved one included.

    `cache_bytes` are taken as they are. None is a share of the memory that is free, but no more
    than `max_num_seqs` sequences of `max_model_len` tokens can fill. `state_bytes` of it are not
    for pages.

    Raises:
        ValueError: there is no room for one page beside the reserved one.
    """
    size = page_bytes(specs, page_size, dtype)
    budget = cache_budget(device, cache_bytes) - state_bytes
    pages = budget // size
    if cache_bytes is None:
        pages = min(pages, 1 + max_num_seqs * -(-max_model_len // page_size))
    if pages < 2:
        raise ValueError(
            f"kv_cache_memory: {budget} bytes hold {pages} pages of {size} bytes ({page_size} "
            "tokens); at least 2 are needed"
        )
    return pages


def cache_budget(device: torch.device, cache_bytes: int | None) -> int:
    """Return `cache_bytes`, or a share of the memory that is free where they are None."""
    if cache_bytes is not None:
        return cache_bytes
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    return int(min(_available_in_system(), _available_in_cgroup()) * CPU_SHARE)


def _available_in_system() -> int:
    """Return the bytes that can be had without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return memory_of_machine()


def memory_of_machine() -> int:
    """Return the bytes of memory that there are."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available_in_cgroup(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Return what a container's limit leaves; infinity where there is none."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        current = int((folder / "memory.current").read_text())
    except OSError:
        return float("inf")
    return float("inf") if limit == "max" else max(0, int(limit) - current)
