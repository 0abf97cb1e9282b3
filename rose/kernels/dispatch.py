"""The one place that says which kernel computes an operation on which kind of device.

An operation is written once in torch: that is its meaning, what tests compare with, and what runs
where no kernel is listed. A kernel of `KERNELS` takes the same arguments. It may decline a call (a
dtype it does not know, a layout) by returning None, and then torch computes it.

The environment variable ROSE_KERNELS chooses: "auto" (the default) uses the kernels of the device,
"torch" none, and "triton" those for CUDA on every device, which works on a CPU in Triton's
interpreter. (ROSE_CPU_KERNELS=off turns off all that is compiled for CPUs, also linear layers and
attention.)
"""

import logging
import os
from collections.abc import Callable
from functools import cache, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Kernel = Callable[..., Any]

SWITCH = "ROSE_KERNELS"
CHOICES = ("auto", "torch", "triton")

_TRITON, _CPU = "rose.kernels.triton", "rose.kernels.cpu"
# Type of the device -> operation -> "module:function".
KERNELS: dict[str, dict[str, str]] = {
    "cpu": {
        "rms_norm": f"{_CPU}.ops:rms_norm",
        "add_rms_norm": f"{_CPU}.ops:add_rms_norm",
        "layer_norm": f"{_CPU}.ops:layer_norm",
        "add_layer_norm": f"{_CPU}.ops:add_layer_norm",
        "add_layer_norm_with_sum": f"{_CPU}.ops:add_layer_norm_with_sum",
        "norm_and_rotate": f"{_CPU}.ops:norm_and_rotate",
        "norm_rotate_and_store": f"{_CPU}.ops:norm_rotate_and_store",
        "store_kv": f"{_CPU}.ops:store_kv",
        "embed_and_norm": f"{_CPU}.ops:embed_and_norm",
        "pool_and_finish": f"{_CPU}.ops:pool_and_finish",
    },
    "cuda": {
        "rms_norm": f"{_TRITON}.norm:rms_norm",
        "add_rms_norm": f"{_TRITON}.norm:add_rms_norm",
        "layer_norm": f"{_TRITON}.norm:layer_norm",
        "add_layer_norm": f"{_TRITON}.norm:add_layer_norm",
        "add_layer_norm_with_sum": f"{_TRITON}.norm:add_layer_norm_with_sum",
        "gated": f"{_TRITON}.activation:gated",
        "norm_and_rotate": f"{_TRITON}.heads:norm_and_rotate",
        "norm_rotate_and_store": f"{_TRITON}.heads:norm_rotate_and_store",
        "store_kv": f"{_TRITON}.heads:store_kv",
        "embed_and_norm": f"{_TRITON}.embedding:embed_and_norm",
        "pool_and_finish": f"{_TRITON}.pooling:pool_and_finish",
    },
}


class Operation(Generic[P, R]):
    """A function on tensors that other kernels can compute too. The first tensor says where."""

    def __init__(self, reference: Callable[P, R]) -> None:
        """Wrap the torch version."""
        self.reference = reference
        self.name = reference.__name__
        self._kernels: dict[torch.device, Kernel | None] = {}
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute by the device's kernel where there is one that takes these arguments."""
        device = cast("Tensor", args[0]).device
        try:
            kernel = self._kernels[device]
        except KeyError:
            kernel = self._kernels[device] = find_kernel(self.name, device.type)
        if kernel is not None:
            result = kernel(*args, **kwargs)
            if result is not None:
                return cast("R", result)
        return self.reference(*args, **kwargs)


def operation(reference: Callable[P, R]) -> Operation[P, R]:
    """Make a torch function one that `KERNELS` may have a faster version of."""
    return Operation(reference)


def find_kernel(name: str, device_type: str) -> Kernel | None:
    """Return the kernel of an operation, or None where torch computes it.

    Raises:
        ValueError: ROSE_KERNELS has an unknown value.
    """
    choice = os.environ.get(SWITCH, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{SWITCH}={choice!r} is unknown. Known: {', '.join(CHOICES)}.")
    if choice == "torch":
        return None
    target = KERNELS.get("cuda" if choice == "triton" else device_type, {}).get(name)
    if target is None or (target.startswith(_TRITON) and not _has_triton()):
        return None
    module, _, attribute = target.partition(":")
    return cast("Kernel", getattr(import_module(module), attribute))


@cache
def _has_triton() -> bool:
    if find_spec("triton") is None:
        log.warning("triton is not installed: torch computes what its kernels would")
        return False
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        log.warning("the GPU is too old for triton: torch computes what its kernels would")
        return False
    return True
