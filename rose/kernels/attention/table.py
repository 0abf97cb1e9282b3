"""Measured times of attention back ends, kept per user in a small file.

`rose bench attention` writes it; "auto" reads it when a model is loaded. An entry holds for one
device, shape of heads and kind of batch:

    {"version": 1, "entries": [{"device": "NVIDIA H200", "heads": 16, "kv_heads": 8,
      "head_dim": 128, "causal": true, "paged": false,
      "milliseconds": {"flashinfer-fa3": 0.21, "torch-flash": 0.25}}]}
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import AttentionSpec

log = logging.getLogger(__name__)

VERSION = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """What an entry is found by."""

    device: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    paged: bool


def shape_of(spec: AttentionSpec, device: torch.device, *, paged: bool) -> Shape:
    """Return the shape that a layer's entry is found by."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Shape(name, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.causal, paged)


def ranking(specs: Sequence[AttentionSpec], device: torch.device, *, paged: bool) -> list[str]:
    """Return the measured back ends by their time over all layers, the fastest first.

    Only those that were measured for every shape of the layers count; there may be none.
    """
    entries = read()
    if not entries:
        return []
    times = [entries.get(shape_of(spec, device, paged=paged), {}) for spec in specs]
    names = [name for name in BACKENDS if times and all(name in one for one in times)]
    return sorted(names, key=lambda name: sum(one[name] for one in times))


def path() -> Path:
    """Return where the table is: $XDG_CACHE_HOME/rose/attention.json, else below ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "rose" / "attention.json"


def read() -> dict[Shape, dict[str, float]]:
    """Return the milliseconds of each back end by shape; empty where nothing was measured.

    A damaged file is the same as none, with a warning: it must not keep a model from loading.
    """
    try:
        table = json.loads(path().read_text(encoding="utf-8"))
        if table["version"] != VERSION:
            return {}
        return {_shape(entry): _times(entry["milliseconds"]) for entry in table["entries"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is left out: %s: %s", path(), type(error).__name__, error)
        return {}


def write(measured: dict[Shape, dict[str, float]]) -> None:
    """Add times to the table, in place of older ones of the same shapes.

    Raises:
        OSError: the file cannot be written.
    """
    entries = read() | measured
    table = {
        "version": VERSION,
        "entries": [asdict(shape) | {"milliseconds": times} for shape, times in entries.items()],
    }
    path().parent.mkdir(parents=True, exist_ok=True)
    fresh = path().with_suffix(".new")
    fresh.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path())


def _shape(entry: "dict[str, object]") -> Shape:
    return Shape(**{name: entry[name] for name in Shape.__slots__})  # type: ignore[arg-type]


def _times(times: "dict[str, object]") -> dict[str, float]:
    return {name: float(value) for name, value in times.items()}  # type: ignore[arg-type]
