"""Rotary position embedding (Su et al., 2021) of queries and keys.

Shape letters: T tokens, H query heads, K key/value heads, D head size, R rotary dimensions (<= D).
"""

import torch
from torch import Tensor


def apply_rope(
    q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the first R channels of every head; the other D - R pass unchanged.

    Channel i is paired with channel i + R / 2 (the "neox" or half-split style), so both halves of
    a row of `cos_TR` and of `sin_TR` usually hold the same R / 2 values.

    Args:
        q_THD: queries [T, H, D].
        k_TKD: keys [T, K, D].
        cos_TR: cosines [T, R], R even. A dtype wider than the queries' is computed in, and the
            result rounded once.
        sin_TR: sines, as `cos_TR`.

    Returns:
        New tensors with the shapes and dtypes of the queries and the keys.
    """
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return _rotate(q_THD, cos_T1R, sin_T1R), _rotate(k_TKD, cos_T1R, sin_T1R)


def _rotate(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    rotary = cos_T1R.shape[-1]
    half = rotary // 2
    x_THR = x_THD if rotary == x_THD.shape[-1] else x_THD[..., :rotary]
    out_THR = x_THR * cos_T1R
    # One fused multiply-add per half instead of the copies that a concatenated half-turn needs.
    out_THR[..., :half].addcmul_(x_THR[..., half:], sin_T1R[..., :half], value=-1)
    out_THR[..., half:].addcmul_(x_THR[..., :half], sin_T1R[..., half:])
    out_THR = out_THR.to(x_THD.dtype)
    if x_THR is x_THD:
        return out_THR
    return torch.cat((out_THR, x_THD[..., rotary:]), dim=-1)
