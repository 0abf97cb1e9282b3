"""The state pool: how large it is, and that rows can be copied."""

import pytest
import torch

from rose.kernels.recurrence import StateSpec
from rose.runtime.state_pool import allocate_states, copy_states, fit_states, row_bytes, state_row

SPECS = [StateSpec(0, 10, 4, 4, 6, 5), StateSpec(1, 10, 4, 4, 6, 5)]
ROW = 2 * (4 * 6 * 5 * 4 + 3 * 10 * 2)  # float32 matrices, half precision inputs


def test_the_pool_has_a_row_per_slot_and_one_for_padding():
    states = allocate_states(SPECS, 8, torch.bfloat16, torch.device("cpu"))
    assert [x.shape for x in states.matrices] == [(9, 4, 6, 5)] * 2
    assert [x.shape for x in states.conv] == [(9, 3, 10)] * 2
    assert {x.dtype for x in states.matrices} == {torch.float32}
    assert {x.dtype for x in states.conv} == {torch.bfloat16}
    assert row_bytes(SPECS, torch.bfloat16) == ROW
    assert sum(x.nbytes for x in (*states.conv, *states.matrices)) == 9 * ROW
    assert [state_row(slot) for slot in range(8)] == list(range(1, 9))


def test_as_many_sequences_run_as_half_of_the_memory_holds():
    fit = fit_states(SPECS, torch.bfloat16, 32, 10**9)
    assert fit == (32, 128, 193 * ROW)
    assert fit_states(SPECS, torch.bfloat16, 32, 2 * 97 * ROW) == (32, 32, 97 * ROW)
    assert fit_states(SPECS, torch.bfloat16, 32, 2 * 97 * ROW - 2) == (31, 33, 96 * ROW)
    assert fit_states(SPECS, torch.bfloat16, 32, 8 * ROW) == (1, 1, 4 * ROW)
    assert fit_states(SPECS, torch.bfloat16, 32, 6 * ROW) == (1, 0, 3 * ROW)
    with pytest.raises(ValueError, match=f"kv_cache_memory.*2 sequences of {ROW} bytes"):
        fit_states(SPECS, torch.bfloat16, 32, 6 * ROW - 2)


def test_rows_are_copied_in_all_layers():
    states = allocate_states(SPECS, 4, torch.bfloat16, torch.device("cpu"))
    for layer, pool in enumerate((*states.conv, *states.matrices)):
        pool[3] = layer + 1
        pool[4] = torch.nan  # what a failed sequence left
    copy_states(states, torch.tensor([3, 0]), torch.tensor([4, 1]))
    for layer, pool in enumerate((*states.conv, *states.matrices)):
        assert (pool[4] == layer + 1).all()
        assert (pool[1] == 0).all()
