"""What all launchers share: which tensors a kernel takes, and how large its blocks are."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_CHANNELS = 16384  # of a row that one program holds at once
TILE = 1024  # elements of a program's block, where rows are shorter than that


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below `size`."""
    return 1 << max(0, size - 1).bit_length()


def covers(*tensors: Tensor | None) -> bool:
    """Say whether all tensors have one dtype, which the kernels know."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(dtypes) == 1 and dtypes <= set(DTYPES)


def row_blocks(channels: int) -> tuple[int, int, int]:
    """Return rows and channels of a program's block, and its warps, for rows of `channels`.

    They depend on the width alone, so a row's sum is the same whatever the other rows are.
    """
    block = power_of_two(channels)
    rows = max(1, TILE // block)
    return rows, block, min(16, max(1, rows * block // 512))
