"""L2 normalisation of embedding vectors. Shape letters: B rows, C channels."""

import torch
from torch import Tensor


def l2_normalize(x_BC: Tensor) -> Tensor:
    """Scale every row to length 1, in float32.

    Rows of zeros stay zeros. Rows are first divided by their largest magnitude, so that squares
    neither overflow nor vanish: any finite row but zero gets length 1.

    Args:
        x_BC: [..., C], any floating dtype.

    Returns:
        float32 of the same shape. A row with NaN or infinity gives NaN.
    """
    x_f32 = x_BC.float()
    largest = x_f32.abs().amax(-1, keepdim=True)
    x_f32 = x_f32 / largest.masked_fill(largest == 0, 1.0)
    length = torch.linalg.vector_norm(x_f32, dim=-1, keepdim=True)
    return x_f32 / length.masked_fill_(length == 0, 1.0)
