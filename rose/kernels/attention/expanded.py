"""Attention of sequences that end in tokens that see the others but are not seen.

ColBERT fills queries with mask tokens in this way: each takes from the query what it may, and the
query's own vectors are as if they were not there. Works on any device, by torch.

Shape letters: T tokens of the batch, H query heads, K key/value heads, D head size, N sequences of
a group, L tokens of each.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from rose.kernels.attention.base import AttentionSpec, PositionBias
from rose.kernels.attention.dense import attend_dense

_BiasKey = tuple[bool, tuple[int | None, int | None], PositionBias | None, torch.dtype]


class ExpandedBatch:
    """A planned forward pass, without a KV cache.

    Neighbours of one length are attended at once, so a batch is best sorted by length.
    """

    def __init__(self, lengths: Sequence[int], unseen: Sequence[int], device: torch.device) -> None:
        """Plan sequences of these lengths, of which the last `unseen` tokens are not seen.

        At least one token of each sequence is seen.
        """
        assert all(0 <= hidden < length for length, hidden in zip(lengths, unseen, strict=True))
        starts = [0, *accumulate(lengths)]
        self._groups = []
        for length, members in groupby(range(len(lengths)), key=lambda i: lengths[i]):
            places = list(members)
            seen_N = torch.tensor([length - unseen[i] for i in places], device=device)
            self._groups.append(_Group(starts[places[0]], length, seen_N))

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend within each sequence; returns [T, H, D]."""
        return torch.cat([group.attend(q_THD, k_TKD, v_TKD, spec) for group in self._groups])


class _Group:
    """Sequences of one length, side by side."""

    def __init__(self, start: int, length: int, seen_N: Tensor) -> None:
        self._rows = slice(start, start + length * len(seen_N))
        self._size = (len(seen_N), length)
        self._seen_N = seen_N
        self._biases: dict[_BiasKey, tuple[Tensor, Tensor | None]] = {}

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = (x[self._rows].unflatten(0, self._size) for x in (q_THD, k_TKD, v_TKD))
        key = (spec.causal, spec.window, spec.bias, q_THD.dtype)
        if key not in self._biases:
            self._biases[key] = self._make_bias(*key)
        bias, blind_NL = self._biases[key]
        out_NLHD = attend_dense(q, k, v, scale=spec.scale, soft_cap=spec.soft_cap, bias=bias)
        if blind_NL is not None:
            out_NLHD = out_NLHD.masked_fill(blind_NL[:, :, None, None], 0)
        return out_NLHD.flatten(0, 1)

    def _make_bias(
        self,
        causal: bool,
        window: tuple[int | None, int | None],
        position_bias: PositionBias | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """Return [N, H or 1, L, L]: -inf where a key is not visible; and who sees none, [N, L].

        Such a query, beyond whose window all keys lie, gets zeros, as of torch's own attention.
        It sees the last key here, since a row of -inf alone may become NaN.
        """
        place_L = torch.arange(self._size[1], device=self._seen_N.device)
        distance_LL = place_L - place_L.unsqueeze(1)
        left, right = window
        right = 0 if causal else right
        hidden_LL = torch.zeros_like(distance_LL, dtype=torch.bool)
        if left is not None:
            hidden_LL |= distance_LL < -left
        if right is not None:
            hidden_LL |= distance_LL > right
        seen_N11 = self._seen_N[:, None, None]
        hidden_NLL = hidden_LL | (place_L >= seen_N11)
        blind_NL = hidden_NLL.all(-1) if window != (None, None) else None
        if blind_NL is not None:
            hidden_NLL &= ~(blind_NL.unsqueeze(-1) & (place_L == seen_N11 - 1))
        hidden_N1LL = hidden_NLL.unsqueeze(1)
        if position_bias is None:
            bias = torch.zeros(hidden_N1LL.shape, dtype=dtype, device=place_L.device)
        else:
            bias = position_bias(distance_LL).to(dtype)
        return bias.masked_fill(hidden_N1LL, float("-inf")), blind_NL
