"""The way of new keys and values into the KV pages.

Shape letters: T tokens, K key/value heads, D head size, P pages, S slots of a page.
"""

from torch import Tensor

from rose.kernels.dispatch import operation


@operation
def store_kv(
    k_TKD: Tensor, v_TKD: Tensor, keys_PSKD: Tensor, values_PSKD: Tensor, slots_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Write keys and values into their slots.

    Args:
        k_TKD: keys of the new tokens.
        v_TKD: their values.
        keys_PSKD: the layer's key pages, contiguous, of the keys' dtype.
        values_PSKD: its value pages.
        slots_T: int64, page * S + place in the page. Tokens that share a slot leave either's.

    Returns:
        The pages, changed in place.
    """
    for new, pages in ((k_TKD, keys_PSKD), (v_TKD, values_PSKD)):
        pages.view(-1, *new.shape[1:]).index_copy_(0, slots_T, new)
    return keys_PSKD, values_PSKD
