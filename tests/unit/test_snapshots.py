"""Kept states: which, for how long, and that none is ever another's."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rose.runtime.kv_cache import PagePool
from rose.runtime.scheduler import SLOTS_PER_SEQUENCE
from rose.runtime.snapshots import Snapshots
from tests.unit import test_kv_cache as pool_tests
from tests.unit import test_scheduler as scheduler_tests
from tests.unit.test_kv_cache import fill

LOST = "lost"  # what a row holds after a NaN or a failed step
TEXT = [(5 * i + i // 7) % 9 for i in range(60)]


def with_snapshots(num_rows, num_pages=20, page_size=4, gap=4, interval=16):
    snapshots = Snapshots(num_rows, 100, gap=gap, interval=interval)
    return snapshots, PagePool(num_pages, page_size, snapshots=snapshots)


def fill_and_keep(pool, tokens, *ends, salt=""):
    """Fill pages as a sequence does that keeps its state at `ends`."""
    pages, parent, size = pool.allocate(pool.pages_for(len(tokens))), salt, pool.page_size
    for index in range(len(tokens) // size):
        end = (index + 1) * size
        row = pool.snapshots.reserve() if end in ends else None
        parent = pool.register(pages[index], parent, tokens[end - size : end], row)
        if row is not None:
            pool.snapshots.settle(row)
    return pages


def found(pool, tokens, salt="", limit=None):
    prefix = pool.find(tokens, salt, len(tokens) if limit is None else limit)
    assert (prefix.snapshot is None) is (not prefix.pages)
    return len(prefix.pages), prefix.known


def test_a_text_starts_at_the_deepest_page_with_a_state():
    _, pool = with_snapshots(4)
    fill_and_keep(pool, TEXT[:20], 8, 16)
    assert found(pool, TEXT[:20]) == (4, 5)
    assert found(pool, TEXT[:20], limit=15) == (2, 3)
    assert found(pool, TEXT[:20], limit=7) == (0, 1)
    assert found(pool, [*TEXT[:12], 9, 9, 9, 9]) == (2, 3)
    assert found(pool, TEXT[:20], salt="other") == (0, 0)


def test_a_state_goes_with_its_page():
    snapshots, pool = with_snapshots(2, num_pages=7)
    pages = fill_and_keep(pool, TEXT[:20], 8, 20)
    pool.release(pages)
    pool.release(pool.allocate(2))  # the page that was free, and the last one
    assert found(pool, TEXT[:20]) == (2, 4)
    assert snapshots.num_kept == 1
    pool.check()
    pool.allocate(6)
    assert snapshots.num_kept == 0
    pool.check(range(1, 7))


def test_the_least_recently_used_state_makes_room():
    snapshots, pool = with_snapshots(2)
    fill_and_keep(pool, TEXT[:8], 8)
    fill_and_keep(pool, TEXT[8:16], 8)
    snapshots.touch(pool.find(TEXT, "", 8).parent)
    fill_and_keep(pool, TEXT[16:24], 8)
    assert found(pool, TEXT[:8]) == (2, 2)
    assert found(pool, TEXT[8:16]) == (0, 2), "the pages are still there"
    assert found(pool, TEXT[16:24]) == (2, 2)


def test_rows_that_are_being_written_are_nobodys():
    snapshots, _ = with_snapshots(2)
    rows = [snapshots.reserve(), snapshots.reserve()]
    assert sorted(rows) == [100, 101]
    assert snapshots.reserve() is None
    snapshots.settle(rows[0])
    assert snapshots.reserve() == rows[0]
    snapshots.check([])


def test_a_page_keeps_the_state_that_it_has():
    snapshots, pool = with_snapshots(3)
    fill_and_keep(pool, TEXT[:8], 8)
    before = pool.find(TEXT, "", 8).snapshot
    fill_and_keep(pool, TEXT[:8], 8)
    assert pool.find(TEXT, "", 8).snapshot == before
    assert (snapshots.num_kept, snapshots.num_reserved) == (1, 0)


def test_a_page_that_is_filled_again_takes_the_place_of_one_that_nobody_holds():
    """So the pages between a kept state and where texts part do not grow old."""
    _, pool = with_snapshots(3)
    pool.release(fill_and_keep(pool, TEXT[:8], 8))
    row = pool.find(TEXT, "", 8).snapshot
    again = fill(pool, TEXT[:8])
    prefix = pool.find(TEXT, "", 8)
    assert (prefix.pages, prefix.snapshot) == (again, row)
    pool.check(again)
    assert pool.available == 19 - 2


@pytest.mark.parametrize(
    ("start", "length", "shared", "chosen"),
    [
        (0, 64, [], []),  # too short: 48 tokens
        (0, 65, [], [64]),
        (0, 200, [], [192]),
        (0, 200, [96], [96, 192]),
        (0, 200, [0, 32, 96, 112, 176], [96, 176]),
        (192, 200, [], []),
        (0, 2000, [], [512, 1024, 1536, 1984]),
        (1024, 2000, [1536], [1536, 1984]),
        (0, 2000, [1040], [512, 1040, 1536, 1984]),
        (0, 9000, [], [4096, 8192, 8992]),
    ],
)
def test_where_states_are_kept(start, length, shared, chosen):
    assert Snapshots(1, 0).choose(start, length, 16, shared) == set(chosen)


@pytest.mark.parametrize(
    ("page_size", "start", "length", "shared", "chosen"),
    [
        (16, 0, 64, [], []),
        (16, 0, 65, [], [64]),
        (16, 0, 200, [96], [64, 192]),
        (16, 0, 200, [176], [128, 192]),
        (16, 64, 200, [80], [192]),
        (16, 0, 2000, [1040], [512, 1024, 1536, 1984]),
        (128, 0, 300, [200], [128, 256]),
    ],
)
def test_states_are_kept_at_ends_of_chunks(page_size, start, length, shared, chosen):
    kept = Snapshots(1, 0, grid=64)
    assert kept.choose(start, length, page_size, shared) == set(chosen)
    with pytest.raises(ValueError, match=r"page_size is 48: .* chunks of 64 tokens"):
        PagePool(9, 48, snapshots=kept)


def test_growing_texts_keep_less_and_less_often():
    kept = [n for n in range(1, 10_000) if Snapshots(1, 0).is_regular(n)]
    assert kept == [512, 1024, 1536, 2048, 3072, 4096, 6144, 8192]


def test_snapshots_lie_at_ends_of_pages():
    with pytest.raises(ValueError, match="page_size is 5"):
        with_snapshots(1, page_size=5)


def rig(snapshots=8, seqs=4, interval=16, grid=1, **squeeze):
    kept = Snapshots(snapshots, SLOTS_PER_SEQUENCE * seqs, grid=grid, gap=4, interval=interval)
    rig = scheduler_tests.Rig(seqs=seqs, snapshots=kept, **squeeze)
    device = StateDevice(
        rig.pool.num_pages, rig.pool.page_size, rig.scheduler.num_slots + snapshots
    )
    rig.device = device
    return rig


def serve(rig, request_id, prompt, **params):
    params = {"max_tokens": 3, "ignore_eos": True} | params
    sequence = rig.add(request_id, prompt, **params)
    rig.drain()
    rig.assert_solo(request_id, prompt, **params)
    return sequence.cached_tokens


def test_a_prompt_sent_again_starts_at_its_last_full_page():
    served = rig(num_pages=40)
    assert serve(served, 1, TEXT[:27]) == 0
    assert serve(served, 2, TEXT[:27]) == 24
    assert serve(served, 3, TEXT[:50]) == 24
    assert serve(served, 4, TEXT[:27], cache_salt="x") == 0
    assert served.scheduler.hit_tokens == 48


def test_texts_that_part_are_found_from_the_third_on():
    served = rig(num_pages=80)
    tails = [[n] * 9 for n in range(4)]
    cached = [serve(served, n, TEXT[:22] + tail) for n, tail in enumerate(tails)]
    assert cached == [0, 16, 20, 20], "16 is regular, 20 is where the second parted"


def test_texts_that_wait_together_share_what_they_have_in_common():
    served = rig(num_pages=200, seqs=8, tokens=300, model_len=300)
    head = TEXT + TEXT[10:50]
    prompts = [head + [n] * 30 for n in range(5)]
    sequences = [
        served.add(n, prompt, max_tokens=4, ignore_eos=True) for n, prompt in enumerate(prompts)
    ]
    served.drain()
    assert [sequence.cached_tokens for sequence in sequences] == [0, *[100] * 4]
    for n, prompt in enumerate(prompts):
        served.assert_solo(n, prompt, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(("interval", "waits"), [(16, True), (512, False)])
def test_nobody_waits_for_pages_whose_state_is_not_kept(interval, waits):
    served = rig(num_pages=200, tokens=60, model_len=300, interval=interval, depth=1)
    served.add("long", [*TEXT, *TEXT, 8], max_tokens=2, ignore_eos=True)
    served.launch()
    served.add("short", [*TEXT, *TEXT[:40], 7], max_tokens=2, ignore_eos=True)
    served.land()
    rows = served.launch().rows
    assert ("short" not in {row.sequence.request_id for row in rows}) is waits
    served.drain()


@pytest.mark.parametrize(
    ("tokens", "ends"), [(23, [16, 32, 48, 59]), (5, [5, 8, 13, 16, 21, 24, 29, 32, 37, 40])]
)
def test_parts_of_a_prompt_end_with_chunks(tokens, ends):
    """Unless a step has no room for one."""
    served = rig(num_pages=80, tokens=tokens, grid=8, depth=1)
    served.add(1, TEXT[:59], max_tokens=2, ignore_eos=True)
    found, kept = [], []
    for _ in ends:
        (row,) = served.launch().rows
        found.append(row.end)
        kept += [position for position, _ in row.kept]
        served.land()
    assert found == ends
    assert kept == [position for position in (16, 32, 48, 56) if position <= ends[-1]]
    served.drain()


def test_a_long_output_is_found_by_the_next_turn():
    served = rig(num_pages=40)
    serve(served, 1, TEXT[:6], max_tokens=30)
    assert serve(served, 2, [*TEXT[:6], *served.outputs[1], 4]) == 32


def test_a_preempted_sequence_starts_from_a_kept_state():
    served = rig(num_pages=20, tokens=16, snapshots=16)
    for n in range(4):
        served.add(n, TEXT[n : n + 10], max_tokens=20, ignore_eos=True)
    served.drain()
    assert served.scheduler.preemptions > 0
    assert served.device.restored == [16]
    for n in range(4):
        served.assert_solo(n, TEXT[n : n + 10], max_tokens=20, ignore_eos=True)


def test_a_state_that_was_not_finite_is_found_by_nobody():
    """It lies at a page of another sequence, which has the same tokens and is sound."""
    served = rig(num_pages=80, seqs=4, depth=1)
    served.add(1, TEXT[:22], max_tokens=20, ignore_eos=True)
    for _ in range(3):
        served.step()
    served.add(2, [*TEXT[:14], *[8] * 10], max_tokens=3)
    served.step()
    assert served.pool.find(TEXT, "", 14).snapshot is not None, "the second has kept its state"
    plan = served.launch()
    served.land(broken=[index for index, row in enumerate(plan.rows) if row.num_tokens > 1])
    served.drain()
    assert isinstance(served.ended[2], Exception)
    assert serve(served, 3, [*TEXT[:14], *[7] * 10]) == 0
    assert serve(served, 4, [*TEXT[:14], *[6] * 10]) == 12


class StateDevice(scheduler_tests.FakeDevice):
    """Keeps, beside its pages, a state per row: the tokens that led to it."""

    def __init__(self, num_pages, page_size, num_rows):
        super().__init__(num_pages, page_size, num_rows)
        self.states = [None] * num_rows
        self.restored = []  # positions at which sequences started from a kept state

    def run(self, launched, broken=()):
        rows, _ = launched
        for row, _, _, slot in rows:
            if row.snapshot is not None:
                self.states[slot] = self.states[row.snapshot]
                self.restored.append(row.start)
        for index, (row, ids, _, slot) in enumerate(rows):
            self._advance(row, ids or [self.last_token[slot]], slot, index in broken)
        return super().run(launched, broken)

    def _advance(self, row, fed, slot, is_broken):
        state = [] if row.start == 0 else self.states[slot]
        lost = state is LOST or is_broken or row.sequence in self.broken
        if row.is_wanted and not lost:
            assert state == row.sequence.token_ids[: row.start], "the state is another's"
        assert not lost or not row.is_wanted or row.sequence in self.broken or is_broken
        after = LOST if lost else [*state, *fed]
        self.states[slot] = after
        for position, kept in row.kept:
            assert row.start < position <= row.end
            self.states[kept] = LOST if lost else after[:position]


class StateMachine(scheduler_tests.SchedulerMachine):
    """Requests, cancels, NaNs and failing steps; a state has to follow each sequence."""

    SNAPSHOTS = 3
    GRID = 1

    def __init__(self):
        super().__init__()
        kept = None
        if self.SNAPSHOTS:
            first = SLOTS_PER_SEQUENCE * 3
            kept = Snapshots(self.SNAPSHOTS, first, grid=self.GRID, gap=2, interval=4)
        self.rig = scheduler_tests.Rig(
            num_pages=8,
            page_size=2,
            seqs=3,
            tokens=5,
            model_len=12,
            caching=self.SNAPSHOTS > 0,
            snapshots=kept,
        )
        num_rows = self.rig.scheduler.num_slots + self.SNAPSHOTS
        self.rig.device = StateDevice(8, 2, num_rows)

    @precondition(lambda self: self.rig.flying)
    @rule()
    def land_failed(self):
        """Nobody knows what layers have written to the states before the step failed."""
        self._lose(super().land_failed)

    @precondition(lambda self: self.rig.flying)
    @rule()
    def land_unrun(self):
        self._lose(super().land_unrun)

    def _lose(self, land):
        """Let the oldest step land, and the states be lost that it was to write."""
        rows = self.rig.flying[0][1][0]
        land()
        for row, _, _, slot in rows:
            for place in (slot, *(kept for _, kept in row.kept)):
                self.rig.device.states[place] = LOST


class NoSnapshotMachine(StateMachine):
    SNAPSHOTS = 0


class ChunkedStateMachine(StateMachine):
    """The same where states are kept, and parts of prompts end, with chunks of four tokens."""

    GRID = 4


class WaitingStateMachine(StateMachine):
    """The same where a prompt waits for the smallest page that another computes."""

    SNAPSHOTS = 6

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("rose.runtime.prefixes.WORTH_WAITING_FOR", 2)

    def teardown(self):
        super().teardown()
        self.patch.undo()


class SnapshotPoolMachine(pool_tests.PoolMachine):
    """The page pool's machine; now and then a state is kept with a page, or given up."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(7, self.SIZE, snapshots=Snapshots(2, 10, gap=2, interval=4))
        self.states = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from("ab"))
    def admit(self, tokens, salt):
        prefix = self.pool.find(tokens, salt, len(tokens) - 1)
        assert len(prefix.pages) <= prefix.known
        assert (prefix.snapshot is None) is (not prefix.pages)
        if prefix.snapshot is not None:
            self.pool.snapshots.touch(prefix.parent)
            done = len(prefix.pages) * self.SIZE
            assert self.states[prefix.snapshot] == (salt, tokens[:done]), "the state is another's"
        super().admit(tokens, salt)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fails=st.booleans())
    def register_and_keep(self, data, fails):
        entry = data.draw(st.sampled_from(self.held))
        tokens, pages, index, parent = entry
        end = (index + 1) * self.SIZE
        row = self.pool.snapshots.reserve()
        assert row is not None
        self.states[row] = None
        if not fails and end <= len(tokens):
            salt, _ = self.contents[pages[index]]
            self.states[row] = salt, tokens[:end]
            full = tokens[end - self.SIZE : end]
            entry[2:] = index + 1, self.pool.register(pages[index], parent, full, row)
        self.pool.snapshots.settle(row)


TestStates = StateMachine.TestCase
TestStates.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestNoSnapshots = NoSnapshotMachine.TestCase
TestNoSnapshots.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestChunkedStates = ChunkedStateMachine.TestCase
TestChunkedStates.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestWaitingStates = WaitingStateMachine.TestCase
TestWaitingStates.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestSnapshotPool = SnapshotPoolMachine.TestCase
TestSnapshotPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
