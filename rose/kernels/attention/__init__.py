"""Attention: one contract (`base`) and the back ends that fulfil it (`BACKENDS`)."""

from rose.kernels.attention.base import AttentionBackend
from rose.kernels.registry import Registry

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention back end",
    {"torch_sdpa": "rose.kernels.attention.torch_sdpa:TorchSdpaBackend"},
)
