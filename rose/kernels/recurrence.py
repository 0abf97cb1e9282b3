"""Layers that carry a state from token to token, over packed sequences.

As attention is planned once per forward pass and attended once per layer, so is this: a
`RecurrentBatch` knows where sequences start and end, and where the states lie that earlier tokens
left behind. Models see it alone, so the same model code runs without states (ragged: every sequence
starts from nothing and leaves nothing) and with them.

A state is kept in another row besides where a `Mark` says so, for others to go on from. A sequence
is cut there: whoever goes on from the copy computes what the sequence itself does.

Shape letters: T tokens of the batch, B sequences, N segments of a group, M marks, J tokens and the
inputs before them, R rows of the state pool, W width of the convolution, C its channels, G key
heads, H value heads, K channels of a key, V channels of a value.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import NamedTuple

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


class Mark(NamedTuple):
    """A state to keep: that after `offset` tokens of a sequence in the batch, in `row`."""

    offset: int
    row: int


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Where the sequences of a batch keep their states, on the host.

    `rows` of the pool, one per sequence. `is_new` says that a sequence starts with this batch: it
    starts from nothing, whatever its row holds. `marks` of each sequence, by ascending offset;
    empty where no sequence has any.
    """

    states: States
    rows: tuple[int, ...]
    is_new: tuple[bool, ...]
    marks: tuple[tuple[Mark, ...], ...] = ()


class _Segment(NamedTuple):
    """Tokens of a sequence in one piece, the row of its state, and where a copy is kept."""

    start: int
    length: int
    row: int
    is_new: bool
    copy: int | None = None


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
        self._device = device
        self._stored = stored
        self._marks = stored.marks if stored and stored.marks else ((),) * len(lengths)
        rows = stored.rows if stored else (PADDING_ROW,) * len(lengths)
        is_new = stored.is_new if stored else (True,) * len(lengths)
        starts = list(accumulate(lengths, initial=0))[:-1]
        self._wholes = list(map(_Segment, starts, lengths, rows, is_new))
        self._everyone = _Slots(self._wholes, device)
        self._groups: list[_Group] | None = None
        self._places: dict[int, _ConvPlaces] = {}

    def convolve(self, x_TC: Tensor, weight_CW: Tensor, spec: StateSpec) -> Tensor:
        """Convolve each channel over a token and those before it in its sequence; returns [T, C].

        The last inputs of each sequence become part of its state.
        """
        width = weight_CW.shape[1]
        if width not in self._places:
            self._places[width] = _ConvPlaces(self._lengths, self._marks, width, self._device)
        places = self._places[width]
        pool = None if self._stored is None else self._stored.states.conv[spec.layer]
        history = self._everyone.read(pool, x_TC, (width - 1, x_TC.shape[1]))
        out_TC, joined_JC = causal_conv(
            x_TC, weight_CW, places.token_T, history.flatten(0, 1), places.history_R
        )
        if pool is not None:
            last = joined_JC.index_select(0, places.last_R).unflatten(0, (-1, width - 1))
            self._everyone.write(pool, last)
            if places.kept_R is not None:
                kept = joined_JC.index_select(0, places.kept_R).unflatten(0, (-1, width - 1))
                pool.index_copy_(0, places.kept_row_M, kept)
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
        """Sort segments into those of one token, whose work is a step, and longer ones.

        The second segments of sequences come after the first ones, and so on.
        """
        if self._groups is None:
            self._groups = []
            for stage in zip_longest(*map(_cut, self._wholes, self._marks)):
                segments = [segment for segment in stage if segment is not None]
                single = [segment for segment in segments if segment.length == 1]
                longer = [segment for segment in segments if segment.length > 1]
                self._groups += [self._group(some) for some in (single, longer) if some]
        return self._groups

    def _group(self, segments: list[_Segment]) -> "_Group":
        starts = [segment.start for segment in segments]
        lengths = [segment.length for segment in segments]
        chunks = None
        if max(lengths) > 1:
            chunks = Chunks(starts, lengths, sum(self._lengths), self._device)
            segments = [segments[i] for i in chunks.order]
        tokens = torch.tensor(starts).to(self._device, non_blocking=True)
        return _Group(tokens, chunks, _Slots(segments, self._device))


def _cut(whole: _Segment, marks: tuple[Mark, ...]) -> Iterator[_Segment]:
    """Cut the tokens of a sequence behind each mark, so that its state is that of an end."""
    done = 0
    ends = [*marks, Mark(whole.length, PADDING_ROW)]
    for offset, row in ends:
        if offset > done:
            copy = None if row == PADDING_ROW else row
            is_new = whole.is_new and done == 0
            yield _Segment(whole.start + done, offset - done, whole.row, is_new, copy)
        done = offset


@dataclass(frozen=True, slots=True)
class _Group:
    """Segments that are computed together; `chunks` is None for those of one token."""

    first_tokens: Tensor  # int64 [N]
    chunks: Chunks | None
    slots: "_Slots"


class _Slots:
    """Where some segments have their states."""

    def __init__(self, segments: Sequence[_Segment], device: torch.device) -> None:
        self._device = device
        is_new = [segment.is_new for segment in segments]
        copies = [(i, s.copy) for i, s in enumerate(segments) if s.copy is not None]
        self._count = len(segments)
        self._all_new = all(is_new)
        self._rows = [segment.row for segment in segments]
        self._is_new_N = self._put(is_new) if any(is_new) and not self._all_new else None
        self._copies: tuple[Tensor, Tensor] | None = None  # which [M], to which rows [M]
        if copies:
            self._copies = self._put([i for i, _ in copies]), self._put([row for _, row in copies])

    @cached_property
    def _row_index(self) -> Tensor:
        """int64 [N]; made when a pool is used, which without stored states never happens."""
        return self._put(self._rows)

    def _put(self, values: list[int] | list[bool]) -> Tensor:
        return torch.tensor(values).to(self._device, non_blocking=True)

    def read(self, pool: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the segments' states, each of `shape`, in memory of their own."""
        if pool is None or self._all_new:
            return like.new_zeros(self._count, *shape)
        found = pool.index_select(0, self._row_index)
        if self._is_new_N is None:
            return found
        # Chosen, not multiplied by 0: what another sequence left there may be NaN.
        return found.masked_fill_(self._is_new_N.view(-1, *[1] * len(shape)), 0)

    def write(self, pool: Tensor, states: Tensor) -> None:
        """Store the segments' states, and copies where they are kept."""
        pool.index_copy_(0, self._row_index, states)
        if self._copies is not None:
            which_M, row_M = self._copies
            pool.index_copy_(0, row_M, states.index_select(0, which_M))


class _ConvPlaces:
    """Where tokens and the inputs before them lie once they are joined, sequence by sequence."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        marks: tuple[tuple[Mark, ...], ...],
        width: int,
        device: torch.device,
    ) -> None:
        before = width - 1
        length_B = torch.tensor(lengths)
        sequence_T = torch.repeat_interleave(length_B)
        token_T = torch.arange(len(sequence_T)) + before * (sequence_T + 1)
        history_B = (length_B + before).cumsum(0) - length_B - before
        offset = torch.arange(before)
        history_R = (history_B.unsqueeze(1) + offset).flatten()
        last_R = ((history_B + length_B).unsqueeze(1) + offset).flatten()
        self.token_T = token_T.to(device, non_blocking=True)
        self.history_R = history_R.to(device, non_blocking=True)
        self.last_R = last_R.to(device, non_blocking=True)
        self.kept_R: Tensor | None = None
        kept = [(i, *mark) for i, own in enumerate(marks) for mark in own]
        if kept:
            sequence_M, offset_M, row_M = torch.tensor(kept).unbind(1)
            first_M = history_B[sequence_M] + offset_M
            self.kept_R = (first_M.unsqueeze(1) + offset).flatten().to(device, non_blocking=True)
            self.kept_row_M = row_M.to(device, non_blocking=True)
