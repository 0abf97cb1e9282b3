"""Inputs of a device graph: tensors that stay where they are and get new contents for every batch.

They lie in one piece of memory, so that one copy brings a batch to the device.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; what attention kernels ask of a tensor


class FixedInputs:
    """Named tensors on a device, made outside every graph's memory pool."""

    def __init__(
        self, device: torch.device, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        """Make a tensor of zeros of each field's dtype and shape."""
        self._places: dict[str, slice] = {}
        end = 0
        for name, (dtype, shape) in fields.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + dtype.itemsize * int(np.prod(shape))
            self._places[name] = slice(start, end)
        self._memory = torch.zeros(end, dtype=torch.uint8, device=device)
        self._tensors = {
            name: self._memory[self._places[name]].view(dtype).view(shape)
            for name, (dtype, shape) in fields.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        """Return a field's tensor."""
        return self._tensors[name]

    def fill(self, **arrays: npt.NDArray[Any]) -> None:
        """Queue one copy that overwrites all fields; each array has its field's dtype and shape."""
        staged = torch.empty(len(self._memory), dtype=torch.uint8, pin_memory=self._memory.is_cuda)
        bytes_of = staged.numpy()
        for name, place in self._places.items():
            array, tensor = arrays[name], self._tensors[name]
            assert array.shape == tuple(tensor.shape), name
            assert array.itemsize == tensor.itemsize, name
            bytes_of[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._memory.copy_(staged, non_blocking=True)  # torch keeps `staged` until it is read
