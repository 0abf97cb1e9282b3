"""Gated activation: act(gate) * up of a fused gate and up projection.

Shape letters: T rows, I intermediate size.
"""

import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.triton.launch import covers, power_of_two

BLOCK_I = 1024
# Names of `rose.kernels.activation` -> what the kernel computes.
_KINDS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "identity": "identity",
    "linear": "identity",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """Apply an activation in float32."""
    if KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        x = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    elif KIND == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif KIND == "sigmoid":
        x = tl.sigmoid(x)
    elif KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "tanh":
        x = _tanh(x)
    return x


@triton.jit
def gated_kernel(out, x, width, KIND: tl.constexpr, BLOCK_I: tl.constexpr):
    """One block of channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = channel < width
    gate_I = tl.load(x + row * 2 * width + channel, mask=inside, other=0.0).to(tl.float32)
    up_I = tl.load(x + row * 2 * width + width + channel, mask=inside, other=0.0).to(tl.float32)
    gate_I = _activate(gate_I, KIND).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + channel, (gate_I * up_I).to(out.dtype.element_ty), mask=inside)


def gated(x_T2I: Tensor, name: str) -> Tensor | None:
    """Return what `rose.kernels.activation.gated` does, or None for other dtypes or names."""
    kind = _KINDS.get(name)
    if kind is None or not covers(x_T2I):
        return None
    x_T2I = x_T2I.contiguous()
    width = x_T2I.shape[-1] // 2
    out_TI = x_T2I.new_empty((*x_T2I.shape[:-1], width))
    block = min(BLOCK_I, power_of_two(width))
    if out_TI.numel():
        gated_kernel[(out_TI.numel() // width, triton.cdiv(width, block))](
            out_TI, x_T2I, width, KIND=kind, BLOCK_I=block, num_warps=max(1, block // 256)
        )
    return out_TI
