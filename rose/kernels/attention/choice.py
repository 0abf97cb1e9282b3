"""Which back end serves a model, for batches without a KV cache and for those over pages.

"auto" takes the first that can serve all layers: those that were measured on this device come
first, by their times (`table`), then the others in a fixed order.
"""

import logging
from collections.abc import Sequence

import torch

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import AttentionBackend, AttentionSpec
from rose.kernels.attention.table import ranking

log = logging.getLogger(__name__)

# Compiled for the device's generation first, then what runs on older ones, then torch.
ORDER = (
    "cpu",
    "flashinfer-fa3",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-fa2",
    "flash-attn-2",
    "torch-flash",
    "torch_sdpa",
)


def choose(
    name: str,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    page_size: int | None = None,
) -> AttentionBackend:
    """Return the back end `name`, or with "auto" the best that can serve all layers.

    Args:
        name: a name of `BACKENDS`, or "auto".
        specs: the model's layers.
        dtype: of queries, keys and values.
        device: where they are.
        page_size: tokens of a page where keys and values lie in pages; None where they do not.

    Raises:
        UnknownNameError: there is no such back end.
        ValueError: it cannot serve a layer, or none can; the message gives the reasons.
    """
    refusals = []
    for candidate in _candidates(specs, device, paged=page_size is not None, name=name):
        backend = BACKENDS.load(candidate)()
        reasons = _reasons(backend, specs, dtype, device, page_size)
        if not reasons:
            where = "without a KV cache" if page_size is None else "over KV pages"
            log.info("attention %s: %s", where, candidate)
            backend.prepare(specs, dtype, paged=page_size is not None)
            return backend
        refusals.append(f"{candidate}: {'; '.join(reasons)}")
    raise ValueError(f"no attention back end can serve this model. {' | '.join(refusals)}")


def _candidates(
    specs: Sequence[AttentionSpec], device: torch.device, *, paged: bool, name: str
) -> list[str]:
    if name != "auto":
        return [name]
    measured = ranking(specs, device, paged=paged)
    known = [*ORDER, *(other for other in BACKENDS if other not in ORDER)]
    return [*measured, *(other for other in known if other not in measured)]


def _reasons(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    page_size: int | None,
) -> list[str]:
    """Say what is in the way, each reason once."""
    found: dict[str, None] = {}
    for spec in specs:
        reasons = (
            backend.unsupported(spec, dtype, device)
            if page_size is None
            else backend.unsupported_paged(spec, dtype, device, page_size)
        )
        found |= dict.fromkeys(reasons)
    return sorted(found)
