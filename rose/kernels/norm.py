"""Normalisation over the last dimension, alone and with the residual addition before it.

Statistics are computed in float32 whatever the input's dtype. Shape letters: T tokens, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.dispatch import operation


@operation
def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """Divide by the root mean square and scale.

    Without an offset the result is rounded to the input's dtype before `weight_C` is applied, as
    Llama's norm does. With one, `weight_offset + weight_C` is applied in float32 before rounding,
    as Gemma's norm (offset 1) does.

    Args:
        x_TC: [..., C], any floating dtype.
        weight_C: [C].
        eps: added to the mean square.
        weight_offset: added to the weight.

    Returns:
        The shape of `x_TC`; its dtype, or the promoted one where the weight's is wider.
    """
    normed_TC = x_TC * _inverse_rms(x_TC, eps)  # float32
    if weight_offset:
        return normed_TC.mul_(weight_C.float() + weight_offset).to(x_TC.dtype)
    normed_TC = normed_TC.to(x_TC.dtype)
    if weight_C.dtype == x_TC.dtype:
        return normed_TC.mul_(weight_C)
    return normed_TC * weight_C


def _inverse_rms(x_TC: Tensor, eps: float) -> Tensor:
    # A reduction with its own accumulator: no float32 copy and no squares of the size of x.
    length = torch.linalg.vector_norm(x_TC, dim=-1, keepdim=True, dtype=torch.float32)
    return length.square_().div_(x_TC.shape[-1]).add_(eps).rsqrt_()


@operation
def add_rms_norm(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`: the norm's input is the next residual."""
    total_TC = x_TC + residual_TC
    return rms_norm(total_TC, weight_C, eps, weight_offset=weight_offset), total_TC


@operation
def layer_norm(x_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float) -> Tensor:
    """Subtract the mean, divide by the standard deviation, scale and shift (bias may be None)."""
    return F.layer_norm(x_TC, weight_C.shape, weight_C, bias_C, eps)


@operation
def add_layer_norm(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> Tensor:
    """Return `layer_norm(x + residual)`.

    This is the step of a post-norm encoder (BERT), whose next residual is the norm's output; for
    pre-norm blocks, which need the sum again, see `add_layer_norm_with_sum`.
    """
    return layer_norm(x_TC + residual_TC, weight_C, bias_C, eps)


@operation
def add_layer_norm_with_sum(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `(layer_norm(x + residual), x + residual)`, the step of a pre-norm block."""
    total_TC = x_TC + residual_TC
    return layer_norm(total_TC, weight_C, bias_C, eps), total_TC
