"""The state pool: how large it is, and that rows follow the scheduler's slots."""

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from rose.kernels.recurrence import StateSpec
from rose.runtime.state_pool import allocate_states, fit_states, row_bytes, state_row
from tests.unit import test_scheduler as scheduler_tests

SPECS = [StateSpec(0, 10, 4, 4, 6, 5), StateSpec(1, 10, 4, 4, 6, 5)]
LOST = "lost"  # what a row holds after a NaN or a failed step
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
    assert fit == (32, 65 * ROW)
    assert fit_states(SPECS, torch.bfloat16, 32, 2 * 65 * ROW).max_num_seqs == 32
    assert fit_states(SPECS, torch.bfloat16, 32, 2 * 65 * ROW - 2).max_num_seqs == 31
    assert fit_states(SPECS, torch.bfloat16, 32, 6 * ROW) == (1, 3 * ROW)
    with pytest.raises(ValueError, match=f"kv_cache_memory.*2 sequences of {ROW} bytes"):
        fit_states(SPECS, torch.bfloat16, 32, 6 * ROW - 2)


class StateDevice(scheduler_tests.FakeDevice):
    """Keeps, beside its pages, a state per slot: the tokens that the sequence has been fed."""

    def __init__(self, num_pages, page_size, num_slots):
        super().__init__(num_pages, page_size, num_slots)
        self.states = [None] * (num_slots + 1)

    def run(self, launched, broken=()):
        rows, _ = launched
        for index, (row, ids, _, slot) in enumerate(rows):
            place = state_row(slot)
            fed = ids or [self.last_token[slot]]
            state = [] if row.start == 0 else self.states[place]
            lost = state is LOST or index in broken or row.sequence in self.broken
            if row.is_wanted and not lost:
                assert state == row.sequence.token_ids[: row.start], "the state is another's"
            assert not lost or not row.is_wanted or row.sequence in self.broken or index in broken
            self.states[place] = LOST if lost else [*state, *fed]
        return super().run(launched, broken)


class StateMachine(scheduler_tests.SchedulerMachine):
    """Requests, cancels, NaNs and failing steps; a state has to follow each sequence."""

    CACHING = False

    def __init__(self):
        super().__init__()
        rig = self.rig
        rig.device = StateDevice(rig.pool.num_pages, rig.pool.page_size, rig.scheduler.num_slots)

    @precondition(lambda self: self.rig.flying)
    @rule()
    def land_failed(self):
        """Nobody knows what layers have written to the states before the step failed."""
        slots = [slot for _, _, _, slot in self.rig.flying[0][1][0]]
        super().land_failed()
        for slot in slots:
            self.rig.device.states[state_row(slot)] = LOST


TestStates = StateMachine.TestCase
TestStates.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
