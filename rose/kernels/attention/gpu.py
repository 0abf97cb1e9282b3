"""What the back ends for GPUs share: which layers none of them serves, and how libraries load."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from rose.kernels.attention.base import AttentionSpec

if TYPE_CHECKING:
    from types import ModuleType

DTYPES = (torch.float16, torch.bfloat16)


def layer_reasons(spec: AttentionSpec, dtype: torch.dtype) -> list[str]:
    """Say why no GPU library can serve a layer; empty when the layer is no obstacle."""
    reasons = []
    if dtype not in DTYPES:
        reasons.append(f"dtype {dtype} is none of {', '.join(map(str, DTYPES))}")
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        reasons.append(
            f"{spec.num_heads} query heads do not divide among {spec.num_kv_heads} kv heads"
        )
    if any(side is not None and side < 0 for side in spec.window):
        reasons.append(f"window {spec.window} has a negative side")
    if spec.soft_cap is not None and spec.soft_cap <= 0:
        reasons.append(f"soft cap {spec.soft_cap} is not positive")
    if spec.bias is not None:
        reasons.append("scores have a bias by position")
    return reasons


def device_reasons(
    device: torch.device, least: tuple[int, int], most: tuple[int, int] | None = None
) -> list[str]:
    """Say why a device is not one with a compute capability from `least` to `most`."""
    if device.type != "cuda":
        return [f"device {device.type} is not a CUDA device"]
    found = torch.cuda.get_device_capability(device)
    if found < least or (most is not None and found > most):
        wanted = "at least" if most is None else "between"
        bounds = " and ".join(f"{a}.{b}" for a, b in (least, most or least)[: 1 + bool(most)])
        return [f"compute capability {found[0]}.{found[1]}: {wanted} {bounds} is needed"]
    return []


@cache
def load_library(name: str, function: str) -> "ModuleType | str":
    """Import a library that has to offer `function`; returns why not where it cannot be."""
    try:
        library = import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # a binary that does not fit fails so
        lines = str(error).splitlines() or [type(error).__name__]
        return f"{name} cannot be imported: {lines[0]}"
    if not hasattr(library, function):
        return f"{name} has no {function}: another version is installed"
    return library
