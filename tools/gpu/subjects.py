"""The back ends that a stage tries: those that can serve here, in a dry run their stand-ins."""

from collections.abc import Iterator, Sequence

import torch

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import AttentionBackend, AttentionSpec
from tests.parity.stand_ins.backends import STAND_INS
from tools.gpu.stage import Context

HALF = torch.bfloat16


def backends(
    context: Context, specs: Sequence[AttentionSpec], page_size: int | None = None
) -> Iterator[AttentionBackend]:
    """Yield the back ends for half precision that serve these layers."""
    kinds = STAND_INS.values() if context.dry else map(BACKENDS.load, sorted(STAND_INS))
    for kind in kinds:
        backend = kind()
        if not any(_reasons(backend, spec, context.device, page_size) for spec in specs):
            backend.prepare(specs, HALF, paged=page_size is not None)
            yield backend


def _reasons(
    backend: AttentionBackend, spec: AttentionSpec, device: torch.device, page_size: int | None
) -> list[str]:
    if page_size is None:
        return backend.unsupported(spec, HALF, device)
    return backend.unsupported_paged(spec, HALF, device, page_size)
