"""Layers that carry a state from token to token, over packed sequences.

As attention is planned once per forward pass and attended once per layer, so is this: a
`RecurrentBatch` knows where sequences start and end, and where the states lie that earlier tokens
left behind. Models see it alone, so the same model code runs without states (ragged: every sequence
starts from nothing and leaves nothing) and with them.

Shape letters: T tokens of the batch, B sequences, N sequences of a group, R rows of the state pool,
W width of the convolution, C its channels, G key heads, H value heads, K channels of a key, V
channels of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rose.kernels.delta_rule import (
    Chunks,
    DeltaInputs,
    causal_conv,
    chunked,
    prepare_inputs,
    recurrent,
)

PADDING_ROW = 0


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Static facts of the state of one layer.

    `layer` counts the layers with a state. The layer keeps the last `conv_width` - 1 inputs of its
    convolution, and a matrix [`key_dim`, `value_dim`] per head.
    """

    layer: int
    conv_channels: int
    conv_width: int
    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class States:
    """The state pool, one tensor of each kind per layer; row 0 is reserved for padding.

    `conv` are [R, W - 1, C] in the dtype of the hidden states, `matrices` float32 [R, H, K, V].
    """

    conv: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Where the sequences of a batch keep their states, on the host.

    `rows` of the pool, one per sequence. `is_new` says that a sequence starts with this batch: it
    starts from nothing, whatever its row holds.
    """

    states: States
    rows: tuple[int, ...]
    is_new: tuple[bool, ...]


class RecurrentBatch:
    """One forward pass of packed sequences. What a layer needs is worked out when it first asks."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        device: torch.device,
        stored: StoredRows | None = None,
    ) -> None:
        """Take the tokens of each sequence; without `stored` they are all that there ever are."""
        self._lengths = lengths
        self._starts = tuple(accumulate(lengths, initial=0))
        self._device = device
        self._stored = stored
        self._everyone = _Slots(range(len(lengths)), stored, device)
        self._groups: list[_Group] | None = None
        self._places: dict[int, _ConvPlaces] = {}

    def convolve(self, x_TC: Tensor, weight_CW: Tensor, spec: StateSpec) -> Tensor:
        """Convolve each channel over a token and those before it in its sequence; returns [T, C].

        The last inputs of each sequence become part of its state.
        """
        width = weight_CW.shape[1]
        if width not in self._places:
            self._places[width] = _ConvPlaces(self._lengths, width, self._device)
        places = self._places[width]
        pool = None if self._stored is None else self._stored.states.conv[spec.layer]
        history = self._everyone.read(pool, x_TC, (width - 1, x_TC.shape[1]))
        out_TC, joined_JC = causal_conv(
            x_TC, weight_CW, places.token_T, history.flatten(0, 1), places.history_R
        )
        if pool is not None:
            last = joined_JC.index_select(0, places.last_R).unflatten(0, (-1, width - 1))
            self._everyone.write(pool, last)
        return out_TC

    def apply_delta_rule(
        self,
        q_TGK: Tensor,
        k_TGK: Tensor,
        v_THV: Tensor,
        decay_TH: Tensor,
        beta_TH: Tensor,
        spec: StateSpec,
    ) -> Tensor:
        """Apply the gated delta rule to each sequence, see `rose.kernels.delta_rule`.

        Returns:
            [T, H, V] in the dtype of `v_THV`.
        """
        inputs = prepare_inputs(q_TGK, k_TGK, v_THV, decay_TH, beta_TH)
        pool = None if self._stored is None else self._stored.states.matrices[spec.layer]
        shape = (spec.num_heads, spec.key_dim, spec.value_dim)
        out_THV = torch.empty_like(inputs.v)
        for group in self._plan_groups():
            state_NHKV = group.slots.read(pool, inputs.v, shape)
            if group.chunks is not None:
                chunked(inputs, group.chunks, state_NHKV, out_THV)
            else:
                at = group.first_tokens
                step = DeltaInputs(*(x.index_select(0, at).unsqueeze(1) for x in inputs))
                out_THV.index_copy_(0, at, recurrent(step, state_NHKV).squeeze(1))
            if pool is not None:
                group.slots.write(pool, state_NHKV)
        return out_THV.to(v_THV.dtype)

    def _plan_groups(self) -> "list[_Group]":
        """Sort sequences into those of one token, whose work is a step, and longer ones."""
        if self._groups is None:
            single = [i for i, length in enumerate(self._lengths) if length == 1]
            longer = [i for i, length in enumerate(self._lengths) if length > 1]
            self._groups = [self._group(members) for members in (single, longer) if members]
        return self._groups

    def _group(self, members: list[int]) -> "_Group":
        starts = [self._starts[i] for i in members]
        lengths = [self._lengths[i] for i in members]
        chunks = None
        if max(lengths) > 1:
            chunks = Chunks(starts, lengths, self._starts[-1], self._device)
            members = [members[i] for i in chunks.order]
        tokens = torch.tensor(starts).to(self._device, non_blocking=True)
        return _Group(tokens, chunks, _Slots(members, self._stored, self._device))


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that are computed together; `chunks` is None for those of one token."""

    first_tokens: Tensor  # int64 [N]
    chunks: Chunks | None
    slots: "_Slots"


class _Slots:
    """Where some sequences of a batch have their states."""

    def __init__(
        self, members: Sequence[int], stored: StoredRows | None, device: torch.device
    ) -> None:
        self._count = len(members)
        self._row_N: Tensor | None = None  # None where all start from nothing and leave nothing
        self._is_new_N: Tensor | None = None  # None where all or none are new
        self._all_new = stored is None or all(stored.is_new[i] for i in members)
        if stored is None:
            return
        self._row_N = torch.tensor([stored.rows[i] for i in members]).to(device, non_blocking=True)
        is_new = [stored.is_new[i] for i in members]
        if any(is_new) and not self._all_new:
            self._is_new_N = torch.tensor(is_new).to(device, non_blocking=True)

    def read(self, pool: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the members' states, each of `shape`, in memory of their own."""
        if pool is None or self._row_N is None or self._all_new:
            return like.new_zeros(self._count, *shape)
        found = pool.index_select(0, self._row_N)
        if self._is_new_N is None:
            return found
        # Chosen, not multiplied by 0: what another sequence left there may be NaN.
        return found.masked_fill_(self._is_new_N.view(-1, *[1] * len(shape)), 0)

    def write(self, pool: Tensor, states: Tensor) -> None:
        """Store the members' states."""
        assert self._row_N is not None
        pool.index_copy_(0, self._row_N, states)


class _ConvPlaces:
    """Where tokens and the inputs before them lie once they are joined, sequence by sequence."""

    def __init__(self, lengths: tuple[int, ...], width: int, device: torch.device) -> None:
        before = width - 1
        length_B = torch.tensor(lengths)
        sequence_T = torch.repeat_interleave(length_B)
        token_T = torch.arange(len(sequence_T)) + before * (sequence_T + 1)
        end_B = (length_B + before).cumsum(0)
        offset = torch.arange(before)
        history_R = ((end_B - length_B - before).unsqueeze(1) + offset).flatten()
        last_R = ((end_B - before).unsqueeze(1) + offset).flatten()
        self.token_T = token_T.to(device, non_blocking=True)
        self.history_R = history_R.to(device, non_blocking=True)
        self.last_R = last_R.to(device, non_blocking=True)
