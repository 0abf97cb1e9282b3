"""The last step on the device of an embedder without further modules: pool, cut, normalise.

Shape letters: T tokens, B sequences, C channels, D channels that are kept.
"""

from torch import Tensor

from rose.kernels.dispatch import operation
from rose.kernels.normalize import l2_normalize
from rose.kernels.pooling import POOLINGS


@operation
def pool_and_finish(
    x_TC: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor | None,
    mode: str,
    width: int,
    normalize: bool,
) -> Tensor:
    """Pool each sequence, keep the first `width` channels, and scale to length 1 if asked.

    Args:
        x_TC: hidden states of packed sequences.
        cu_seqlens: where each sequence starts, and T: integers [B + 1].
        starts: leading tokens of each sequence that are left out, integers [B], or None.
        mode: a name of `rose.kernels.pooling.POOLINGS`.
        width: D.
        normalize: whether to scale each row to length 1; rows of zeros stay zeros.

    Returns:
        float32 [B, D], contiguous.
    """
    pooled_BD = POOLINGS[mode](x_TC, cu_seqlens, starts)[:, :width]
    return l2_normalize(pooled_BD) if normalize else pooled_BD.contiguous()
