"""How the process gets memory from the system."""

import ctypes
import platform

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Ask the allocator to keep large freed blocks for the next step.

    By default glibc gives a block above 32 MiB back to the system when it is freed, and every step
    pays again for the page faults of its activations: about 40 ms per 2,048 tokens of a small
    embedder on one core. Without glibc nothing is done.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
