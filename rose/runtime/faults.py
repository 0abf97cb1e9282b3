"""Which errors of a step mean that the process cannot go on."""

import torch


def is_lasting(error: BaseException) -> bool:
    """Say whether every later step will fail too.

    CUDA keeps an error such as an illegal memory access for the life of the process. Running out
    of memory passes.
    """
    return isinstance(error, torch.AcceleratorError)
