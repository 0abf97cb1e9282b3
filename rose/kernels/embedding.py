"""Token embeddings of the BERT family: a sum of table rows, normed.

Shape letters: T tokens, C channels, V words, P positions, K segments.
"""

import torch.nn.functional as F
from torch import Tensor

from rose.kernels.dispatch import operation
from rose.kernels.norm import add_layer_norm


@operation
def embed_and_norm(
    ids_T: Tensor,
    positions_T: Tensor,
    types_T: Tensor | None,
    words_VC: Tensor,
    positions_PC: Tensor,
    types_KC: Tensor,
    weight_C: Tensor,
    bias_C: Tensor | None,
    eps: float,
) -> Tensor:
    """Return layer_norm(word + segment + position).

    Args:
        ids_T: rows of `words_VC`, int64.
        positions_T: rows of `positions_PC`, int64.
        types_T: rows of `types_KC`, int64; None is row 0 for all.
        words_VC: table of words.
        positions_PC: table of positions.
        types_KC: table of segments.
        weight_C: the norm's weight.
        bias_C: the norm's bias, or None.
        eps: added to the norm's variance.

    Returns:
        [T, C] in the tables' dtype.
    """
    types_TC = types_KC[:1] if types_T is None else F.embedding(types_T, types_KC)
    sum_TC = F.embedding(ids_T, words_VC) + types_TC
    return add_layer_norm(sum_TC, F.embedding(positions_T, positions_PC), weight_C, bias_C, eps)
