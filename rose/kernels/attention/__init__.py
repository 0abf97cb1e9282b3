"""Attention: one contract (`base`) and the back ends that fulfil it (`BACKENDS`)."""

from rose.kernels.attention.base import AttentionBackend
from rose.kernels.registry import Registry

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention back end",
    {
        "cpu": "rose.kernels.attention.cpu:CpuBackend",
        "flash-attn-2": "rose.kernels.attention.flash_attention:FlashAttention2Backend",
        "flash-attn-3": "rose.kernels.attention.flash_attention:FlashAttention3Backend",
        "flash-attn-4": "rose.kernels.attention.flash_attention:FlashAttention4Backend",
        "flashinfer-fa2": "rose.kernels.attention.flashinfer:FlashInferFa2Backend",
        "flashinfer-fa3": "rose.kernels.attention.flashinfer:FlashInferFa3Backend",
        "torch-flash": "rose.kernels.attention.flash_attention:TorchFlashBackend",
        "torch_sdpa": "rose.kernels.attention.torch_sdpa:TorchSdpaBackend",
    },
)
