"""The tensors of the state pool, for models with layers that carry a state from token to token.

It has a row for every slot of the scheduler, behind row 0, which is reserved for padding. So a
sequence has its row from when it is admitted until no step in flight uses it any more; whoever
starts in a row starts from nothing or from a copy of a kept state, also when a sequence is computed
again after preemption. The kept states have the rows behind those, see `rose.runtime.snapshots`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rose.kernels.recurrence import PADDING_ROW, States, StateSpec
from rose.runtime.kv_pool import allocate_zeros
from rose.runtime.scheduler import SLOTS_PER_SEQUENCE

SHARE = 0.5  # of the memory for pages and states that the states may take, if need be
SNAPSHOTS_PER_SEQUENCE = 4  # kept states for the prefix cache, where there is room


class StateSize(NamedTuple):
    """How many sequences may run at once, how many states can be kept, and the bytes of all."""

    max_num_seqs: int
    num_snapshots: int
    num_bytes: int


def state_row(slot: int | None) -> int:
    """Return the row of a sequence that runs in `slot`; kept states count on behind the slots."""
    assert slot is not None, "a sequence without a slot was scheduled"
    return PADDING_ROW + 1 + slot


def row_bytes(specs: Sequence[StateSpec], dtype: torch.dtype) -> int:
    """Return the bytes of a sequence's states in all layers."""
    conv = sum((spec.conv_width - 1) * spec.conv_channels for spec in specs)
    matrices = sum(spec.num_heads * spec.key_dim * spec.value_dim for spec in specs)
    return conv * dtype.itemsize + matrices * torch.float32.itemsize


def allocate_states(
    specs: Sequence[StateSpec], num_slots: int, dtype: torch.dtype, device: torch.device
) -> States:
    """Allocate the pool."""
    rows = state_row(num_slots)
    conv = [(rows, spec.conv_width - 1, spec.conv_channels) for spec in specs]
    matrices = [(rows, spec.num_heads, spec.key_dim, spec.value_dim) for spec in specs]
    return States(
        tuple(allocate_zeros(shape, dtype, device) for shape in conv),
        tuple(allocate_zeros(shape, torch.float32, device) for shape in matrices),
    )


def fit_states(
    specs: Sequence[StateSpec], dtype: torch.dtype, max_num_seqs: int, budget: int
) -> StateSize:
    """Return how many sequences, at most `max_num_seqs`, can run at once, and how many kept states.

    Where memory is short, there is one kept state for each sequence.

    Args:
        specs: the model's layers with a state.
        dtype: of the hidden states.
        max_num_seqs: the user's limit.
        budget: bytes for pages and states together; states take half of it at most.

    Raises:
        ValueError: there is no room for one sequence.
    """
    size = row_bytes(specs, dtype)
    room = int(budget * SHARE) // size
    most = max(1, (room - state_row(0)) // (SLOTS_PER_SEQUENCE + 1))
    if room < state_row(SLOTS_PER_SEQUENCE):
        raise ValueError(
            f"kv_cache_memory: half of {budget} bytes has room for the states of {room} sequences "
            f"of {size} bytes each; at least {state_row(SLOTS_PER_SEQUENCE)} are needed"
        )
    seqs = min(max_num_seqs, most)
    rows = state_row(SLOTS_PER_SEQUENCE * seqs)
    snapshots = min(SNAPSHOTS_PER_SEQUENCE * seqs, room - rows)
    return StateSize(seqs, snapshots, (rows + snapshots) * size)


def copy_states(states: States, from_N: Tensor, to_N: Tensor) -> None:
    """Copy rows of the pool, in all layers.

    Args:
        states: the pool.
        from_N: rows, int64.
        to_N: rows that get their contents, int64.
    """
    for pool in (*states.conv, *states.matrices):
        pool.index_copy_(0, to_N, pool.index_select(0, from_N))
