"""The GPU back ends on a CPU, with a stand-in for the library of each; their names say so."""

import torch

from rose.kernels.attention.base import AttentionBackend
from rose.kernels.attention.flash_attention import (
    FlashAttention2Backend,
    FlashAttention3Backend,
    FlashAttention4Backend,
    FlashAttentionBackend,
    TorchFlashBackend,
)
from rose.kernels.attention.flashinfer import (
    FlashInferBackend,
    FlashInferFa2Backend,
    FlashInferFa3Backend,
)
from tests.parity.stand_ins import flash_attn_stand_in, flashinfer_stand_in


class _OnCpu:
    library_stand_in: object

    def device_reasons(self, device: torch.device) -> list[str]:
        return [] if device.type == "cpu" else ["the stand-in computes on a CPU"]

    def library(self) -> object:
        return self.library_stand_in


class _FlashInferOnCpu(_OnCpu):
    library_stand_in = flashinfer_stand_in

    def new_event(self) -> flashinfer_stand_in.Event:
        return flashinfer_stand_in.Event()

    def num_sms(self, device: torch.device) -> int:
        return flashinfer_stand_in.SMS

    def prepare(self, specs, dtype, *, paged):
        """Nothing to compile."""


def _stand_in(
    real: type[FlashInferBackend | FlashAttentionBackend], library: object = None
) -> type[AttentionBackend]:
    base = _FlashInferOnCpu if issubclass(real, FlashInferBackend) else _OnCpu
    facts = {"name": f"{real.name}-stand-in"} | ({"library_stand_in": library} if library else {})
    return type(f"StandIn{real.__name__}", (base, real), facts)


# Name of the real back end -> the one with a stand-in for its library.
STAND_INS: dict[str, type[AttentionBackend]] = {
    "flash-attn-2": _stand_in(FlashAttention2Backend, flash_attn_stand_in.flash_attn),
    "flash-attn-3": _stand_in(FlashAttention3Backend, flash_attn_stand_in.flash_attn_interface),
    "flash-attn-4": _stand_in(FlashAttention4Backend, flash_attn_stand_in.flash_attn_cute),
    "flashinfer-fa2": _stand_in(FlashInferFa2Backend),
    "flashinfer-fa3": _stand_in(FlashInferFa3Backend),
    "torch-flash": _stand_in(TorchFlashBackend, flash_attn_stand_in.torch_operators),
}
