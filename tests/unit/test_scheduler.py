"""The scheduler against a fake device, whose memory shows every page that is mixed up or reused."""

import subprocess
import sys
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose.runtime.errors import NonFiniteError, RequestError
from rose.runtime.kv_cache import PagePool
from rose.runtime.options import SamplingParams
from rose.runtime.scheduler import BULK_HANDICAP, Scheduler

VOCAB, EOS = 11, 0
POISON = "poison"  # what the memory holds after a NaN


def next_token(tokens):
    """The fake model: a token that depends on every token before it and its place."""
    return sum((i + 1) * (t + 3) ** 2 for i, t in enumerate(tokens)) % VOCAB


def solo(prompt, params, limit, eos=EOS):
    """What a sequence has to bring, whatever else runs: tokens and why it ends."""
    tokens = list(prompt)
    most = limit - len(prompt)
    most = most if params.max_tokens is None else min(most, params.max_tokens)
    while len(tokens) - len(prompt) < most:
        tokens.append(next_token(tokens))
        ends = {*params.stop_token_ids, *([] if params.ignore_eos else [eos])}
        if tokens[-1] in ends and len(tokens) - len(prompt) > params.min_tokens:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class FakeDevice:
    """Takes steps in order. Each page slot of its memory holds a token and its position."""

    def __init__(self, num_pages, page_size, num_slots):
        self.size = page_size
        self.memory = [[None] * page_size for _ in range(num_pages)]
        self.last_token = [None] * num_slots
        self.broken = set()

    def snapshot(self, plan):
        """Take down all that a launch may know: pages and tokens as they are at that moment."""
        rows = []
        for row in plan.rows:
            s = row.sequence
            ids = s.token_ids[row.start : row.end]
            assert len(ids) == row.num_tokens or (row.num_tokens == 1 and not ids)
            rows.append((row, ids, list(s.pages), s.slot))
        return rows, list(plan.scrub)

    def run(self, launched, broken=()):
        rows, scrub = launched
        for page in scrub:
            self.memory[page] = [None] * self.size
        for row, ids, pages, slot in rows:
            tokens = ids or [self.last_token[slot]]
            for position, token in enumerate(tokens, row.start):
                self.memory[pages[position // self.size]][position % self.size] = (position, token)
        return [self._sample(*entry, index in broken) for index, entry in enumerate(rows)]

    def _sample(self, row, _ids, pages, slot, broken):
        broken = broken or row.sequence in self.broken
        if not (broken or row.is_wanted):
            return None  # it may rest on a step that failed, and is dropped
        cells = [cell for page in pages for cell in self.memory[page]]
        assert broken or POISON not in cells, "a page with NaN was handed out"
        if broken:
            self.broken.add(row.sequence)
            for position in range(row.start, row.end):
                self.memory[pages[position // self.size]][position % self.size] = POISON
            return NonFiniteError("NaN")
        assert [cell[0] for cell in cells[: row.end]] == list(range(row.end))
        if row.output_index is None:
            return None
        self.last_token[slot] = next_token([cell[1] for cell in cells[: row.end]])
        return self.last_token[slot]


class Rig:
    """Scheduler and fake device with up to two steps in flight."""

    def __init__(
        self,
        num_pages=9,
        page_size=4,
        seqs=4,
        tokens=16,
        model_len=64,
        caching=True,
        depth=2,
        snapshots=None,
    ):
        self.pool = PagePool(num_pages, page_size, prefix_caching=caching, snapshots=snapshots)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=seqs,
            max_step_tokens=tokens,
            max_model_len=model_len,
            eos_ids=[EOS],
        )
        self.device = FakeDevice(num_pages, page_size, self.scheduler.num_slots)
        self.depth = depth
        self.flying = deque()
        self.outputs = {}
        self.ended = {}
        self.prompt_rows = {}

    def add(self, request_id, prompt, priority="online", **params):
        sequence = self.scheduler.add(request_id, prompt, SamplingParams(**params), priority)
        self.ended.pop(request_id, None)
        self.outputs[request_id] = []
        self.prompt_rows[request_id] = []
        return sequence

    def launch(self):
        plan = self.scheduler.schedule()
        if plan is not None:
            self.flying.append((plan, self.device.snapshot(plan)))
        return plan

    def land(self, broken=(), error=None, *, ran=True):
        """Take in the oldest step; one that did not run has neither computed nor zeroed anything."""
        plan, launched = self.flying.popleft()
        results = self.device.run(launched, broken) if ran else None
        if error is None:
            outcomes = self.scheduler.complete(plan, results)
        else:
            outcomes = self.scheduler.fail(plan, error)
        for outcome in outcomes:
            request_id = outcome.sequence.request_id
            self.prompt_rows[request_id] += plan.rows[outcome.row].prompt_rows
            if outcome.token_id is not None:
                self.outputs[request_id].append(outcome.token_id)
            if outcome.finish or outcome.error:
                assert request_id not in self.ended
                self.ended[request_id] = outcome.finish or outcome.error
        self.scheduler.check()
        return outcomes

    def step(self):
        """Launch as far as possible, then take in the oldest step; False when all is done."""
        while len(self.flying) < self.depth and self.launch():
            pass
        if not self.flying:
            assert not self.scheduler.has_work, "work is left but no step can be scheduled"
            return False
        self.land()
        return True

    def drain(self, limit=5000):
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("the scheduler does not come to an end")
        self.scheduler.check()
        assert self.pool.used == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def assert_solo(self, request_id, prompt, **params):
        tokens, finish = solo(prompt, SamplingParams(**params), self.scheduler.max_len)
        assert self.outputs[request_id] == tokens
        assert self.ended[request_id] == finish


def test_the_scheduler_is_free_of_torch():
    check = "import sys, rose.runtime.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_sequence_alone():
    rig = Rig()
    rig.add("a", [1, 2, 3, 4, 5], max_tokens=7, ignore_eos=True)
    rig.drain()
    rig.assert_solo("a", [1, 2, 3, 4, 5], max_tokens=7, ignore_eos=True)


@pytest.mark.parametrize(
    "limits",
    [{"max_num_seqs": 0}, {"max_step_tokens": 3}, {"max_model_len": 0}],
    ids=lambda limits: next(iter(limits)),
)
def test_limits_that_make_no_sense_are_refused(limits):
    given = {"max_num_seqs": 4, "max_step_tokens": 16, "max_model_len": 64} | limits
    with pytest.raises(ValueError, match=next(iter(limits))):
        Scheduler(PagePool(9, 4), **given)


def test_what_can_never_fit_is_refused_and_the_rest_is_served():
    rig = Rig(num_pages=9, page_size=16, tokens=64, model_len=512)
    with pytest.raises(RequestError, match=r"200 tokens.*128 that fit into the KV cache") as caught:
        rig.add("never", [1] * 200, max_tokens=10)
    assert caught.value.field == "prompt"
    rig.add("long", [2] * 100, max_tokens=200, ignore_eos=True)
    rig.add("short", [3] * 5, max_tokens=5, ignore_eos=True)
    rig.drain()
    assert rig.ended == {"long": "length", "short": "length"}
    assert len(rig.outputs["long"]) == 28
    assert len(rig.outputs["short"]) == 5


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("length", "outputs"), [(126, 2), (127, 1), (128, None), (129, None)])
def test_prompts_around_the_capacity_of_the_pool(length, outputs, caching):
    rig = Rig(num_pages=9, page_size=16, tokens=50, model_len=512, caching=caching)
    if outputs is None:
        with pytest.raises(RequestError, match="KV cache"):
            rig.add("a", [1] * length)
        assert not rig.scheduler.has_work
        return
    for turn in range(2):  # the second time from the prefix cache
        rig.add(turn, [1] * length, ignore_eos=True)
        rig.drain()
        assert len(rig.outputs[turn]) == outputs
        rig.assert_solo(turn, [1] * length, ignore_eos=True)


def test_a_prompt_above_the_models_length_is_refused_naming_it():
    rig = Rig(num_pages=100, model_len=20)
    with pytest.raises(RequestError, match="more than the model's 20"):
        rig.add("a", [1] * 20)
    rig.add("a", [1] * 20, max_tokens=0)
    rig.add("b", [1] * 19)
    rig.drain()
    assert rig.outputs == {"a": [], "b": [next_token([1] * 19)]}


def test_an_empty_prompt_and_a_second_use_of_an_id_are_refused():
    rig = Rig()
    with pytest.raises(RequestError, match="no tokens") as caught:
        rig.add("a", [])
    assert caught.value.field == "prompt"
    rig.add("a", [1])
    with pytest.raises(RequestError, match="in progress already"):
        rig.add("a", [1])
    rig.drain()
    rig.add("a", [1])
    rig.drain()


def test_nothing_is_sampled_when_no_token_is_asked_for():
    rig = Rig()
    rig.add("a", [1, 2, 3], max_tokens=0)
    rig.drain()
    assert (rig.outputs["a"], rig.ended["a"]) == ([], "length")


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("min_tokens", [0, 6])
def test_end_tokens_stop_unless_they_come_too_early(ignore_eos, min_tokens):
    rig = Rig(num_pages=100)
    for seed in range(20):
        rig.add(seed, [seed, 5], max_tokens=30, ignore_eos=ignore_eos, min_tokens=min_tokens)
    rig.add("own", [3, 5], max_tokens=30, ignore_eos=True, stop_token_ids=(4, 7))
    rig.drain()
    for seed in range(20):
        rig.assert_solo(
            seed, [seed, 5], max_tokens=30, ignore_eos=ignore_eos, min_tokens=min_tokens
        )
    rig.assert_solo("own", [3, 5], max_tokens=30, ignore_eos=True, stop_token_ids=(4, 7))
    assert rig.ended["own"] == "stop"


def test_the_token_of_a_step_too_many_is_dropped_and_its_pages_wait_for_that_step():
    rig = Rig(page_size=1, num_pages=30)
    prompt = next([n, 5] for n in range(20) if next_token([n, 5]) == EOS)
    rig.add("a", prompt, max_tokens=20)
    rig.launch()
    rig.launch()  # before the first token is known to be the last
    rig.land()
    assert rig.ended == {"a": "stop"}
    assert not rig.scheduler.has_work
    assert rig.pool.used == 3
    rig.land()
    assert rig.pool.used == 0
    assert rig.outputs["a"] == [EOS]


def test_long_prompts_are_computed_in_chunks_beside_running_decodes():
    rig = Rig(num_pages=60, seqs=4, tokens=8, depth=1)
    rig.add("short", [1, 2], max_tokens=20, ignore_eos=True)
    rig.step()
    rig.add("long", [3] * 30, max_tokens=2, ignore_eos=True)
    while "long" not in rig.ended:
        before = len(rig.outputs["short"])
        rig.step()
        assert len(rig.outputs["short"]) == before + 1, "a decode waited for a prompt"
    rig.drain()
    rig.assert_solo("long", [3] * 30, max_tokens=2, ignore_eos=True)


def test_a_short_prompt_does_not_wait_for_a_long_one_which_keeps_half_of_each_step():
    rig = Rig(num_pages=200, seqs=4, tokens=8, model_len=600, depth=1)
    rig.add("long", list(range(400)), max_tokens=1)
    rig.step()
    rig.add("middle", [3] * 24, max_tokens=1)
    rig.add("short", [1, 2], max_tokens=1)
    ended_after = {}
    for steps in range(1, 200):
        plan = rig.launch()
        if plan is None:
            break
        taken = {row.sequence.request_id: row.num_tokens for row in plan.rows}
        assert taken["long"] >= 4 or "long" in rig.ended or len(taken) == 1
        rig.land()
        for name in rig.ended.keys() - ended_after.keys():
            ended_after[name] = steps
    assert ended_after["short"] <= 3
    assert ended_after["middle"] <= 8
    assert ended_after["long"] <= 400 / 8 + 5, "what the others leave is for the long one"
    rig.drain()


def test_a_step_stays_within_its_budget():
    rig = Rig(num_pages=60, seqs=4, tokens=8)
    for n in range(10):
        rig.add(n, [n] * 9, max_tokens=5)
    while rig.scheduler.has_work:
        plan = rig.launch()
        if plan is not None:
            assert plan.num_tokens <= 8
            assert len(plan.rows) <= 4
        rig.land()


def test_two_equal_prompts_in_the_same_step():
    rig = Rig(num_pages=40)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    rig.add("a", prompt, max_tokens=9, ignore_eos=True)
    rig.add("b", prompt, max_tokens=9, ignore_eos=True)
    rig.drain()
    rig.assert_solo("a", prompt, max_tokens=9, ignore_eos=True)
    rig.assert_solo("b", prompt, max_tokens=9, ignore_eos=True)


@pytest.mark.parametrize("length", range(1, 18))
def test_a_prompt_sent_again_is_found_up_to_its_last_token(length):
    rig = Rig(num_pages=20)
    prompt = [(7 * i) % VOCAB for i in range(length)]
    for turn, variant in enumerate([prompt, prompt, [*prompt, 1], prompt[:-1] or [1]]):
        sequence = rig.add(turn, variant, max_tokens=5, ignore_eos=True)
        rig.drain()
        rig.assert_solo(turn, variant, max_tokens=5, ignore_eos=True)
        if turn == 1:
            assert sequence.cached_tokens == (length - 1) // 4 * 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tail", [0, 20])
def test_a_prompt_waits_for_an_equal_one_instead_of_computing_the_same(depth, tail):
    rig = Rig(num_pages=200, seqs=8, tokens=150, model_len=300, depth=depth)
    head = [(3 * i) % VOCAB for i in range(130)]
    prompts = [[*head, *[n] * tail] for n in range(5)]
    sequences = [rig.add(n, p, max_tokens=4, ignore_eos=True) for n, p in enumerate(prompts)]
    rig.add("salted", prompts[0], max_tokens=4, cache_salt="x", ignore_eos=True)
    rig.drain()
    assert [s.cached_tokens for s in sequences] == [0, *[128] * 4]
    for n, prompt in enumerate(prompts):
        rig.assert_solo(n, prompt, max_tokens=4, ignore_eos=True)
    rig.assert_solo("salted", prompts[0], max_tokens=4, ignore_eos=True)


def test_prompts_that_share_little_do_not_wait():
    rig = Rig(num_pages=300, seqs=8, tokens=600, model_len=300)
    rig.add("a", [1] * 80 + [2] * 100)
    rig.add("b", [1] * 80 + [3] * 100)
    rig.add("c", [1] * 40 + [4] * 2)
    assert [row.sequence.request_id for row in rig.launch().rows] == ["a", "b", "c"]
    rig.drain()


def test_the_output_of_a_turn_is_found_by_the_next_turn():
    rig = Rig(num_pages=20)
    rig.add(1, [1, 2, 3], max_tokens=7, ignore_eos=True)
    rig.drain()
    sequence = rig.add(2, [1, 2, 3, *rig.outputs[1], 4], max_tokens=3)
    rig.drain()
    assert sequence.cached_tokens == 8  # the last output token was never fed


def test_prompt_logprobs_leave_the_cache_alone_and_cover_each_place_once():
    rig = Rig(num_pages=20, tokens=5)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    rig.add("warm", prompt, max_tokens=1)
    rig.drain()
    sequence = rig.add("echo", prompt, max_tokens=3, prompt_logprobs=0)
    rig.drain()
    assert sequence.cached_tokens == 0
    assert rig.prompt_rows["echo"] == list(range(8))
    assert rig.prompt_rows["warm"] == []


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_no_output_and_every_prompt_place_comes_once(caching, depth):
    rig = Rig(num_pages=12, page_size=4, seqs=8, tokens=16, caching=caching, depth=depth)
    prompts = [[(n * i) % VOCAB for i in range(5 + 2 * n)] for n in range(8)]
    for n, prompt in enumerate(prompts):
        rig.add(n, prompt, max_tokens=24, ignore_eos=True, prompt_logprobs=0 if n % 2 else None)
    rig.drain()
    assert rig.scheduler.preemptions > 0
    for n, prompt in enumerate(prompts):
        rig.assert_solo(n, prompt, max_tokens=24, ignore_eos=True)
        assert rig.prompt_rows[n] == (list(range(len(prompt) - 1)) if n % 2 else [])


def test_the_oldest_sequence_is_never_preempted():
    rig = Rig(num_pages=9, page_size=2, seqs=8, tokens=16)
    first = rig.add(0, [1, 2, 3], max_tokens=13, ignore_eos=True)
    for n in range(1, 6):
        rig.add(n, [n, 2, 3], max_tokens=13, ignore_eos=True)
    steps = 0
    while 0 not in rig.ended:
        rig.step()
        steps += 1
        assert first.pages or 0 in rig.ended
    assert steps <= 2 * 13
    assert rig.scheduler.preemptions > 0
    rig.drain()


def test_online_work_goes_first_but_bulk_is_not_starved():
    rig = Rig(num_pages=100, seqs=1, tokens=8)
    rig.add("bulk", [1], priority="bulk", max_tokens=1)
    for n in range(BULK_HANDICAP + 10):
        rig.add(n, [n % VOCAB], max_tokens=1)
    rig.drain()
    order = list(rig.ended)
    assert BULK_HANDICAP - 2 <= order.index("bulk") <= BULK_HANDICAP


def test_cancel_in_every_state_is_quiet_and_gives_everything_back():
    rig = Rig(num_pages=8, page_size=2, seqs=3, tokens=6)
    rig.scheduler.cancel("unknown")
    for n in range(6):
        rig.add(n, [n] * 8, max_tokens=10, ignore_eos=True)
    rig.scheduler.cancel(5)  # while it waits
    rig.launch()
    rig.scheduler.cancel(0)  # during its prefill
    rig.scheduler.cancel(0)  # twice
    rig.launch()
    rig.land()
    rig.scheduler.cancel(1)
    rig.drain()
    rig.scheduler.cancel(2)  # finished
    rig.scheduler.check()
    assert set(rig.ended) == {2, 3, 4}
    for n in (2, 3, 4):
        rig.assert_solo(n, [n] * 8, max_tokens=10, ignore_eos=True)


def test_a_sequence_with_nan_fails_alone_and_its_pages_are_cleaned():
    rig = Rig(num_pages=9, page_size=4, seqs=4, tokens=16)
    for n in range(4):
        rig.add(n, [n, 1, 2], max_tokens=12, ignore_eos=True)
    rig.launch()
    rig.launch()
    rig.land(broken=[2])
    assert isinstance(rig.ended[2], NonFiniteError)
    assert rig.outputs[2] == []
    rig.add("next", [2, 1, 2], max_tokens=12, ignore_eos=True)
    rig.drain()
    for n in (0, 1, 3):
        rig.assert_solo(n, [n, 1, 2], max_tokens=12, ignore_eos=True)
    rig.assert_solo("next", [2, 1, 2], max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("as_a_whole", [True, False])
def test_the_pages_of_a_cancelled_sequence_are_cleaned_as_well(as_a_whole):
    rig = Rig(num_pages=8)
    for request_id in "ab":
        rig.add(request_id, [1, 1], max_tokens=9)
    rig.launch()
    rig.scheduler.cancel("a")
    rig.land(broken=[0], error=RuntimeError("a step that failed") if as_a_whole else None)
    rig.drain()
    rig.add("c", [1], max_tokens=9, ignore_eos=True)
    rig.add("d", [1] * 20, max_tokens=3, ignore_eos=True)
    rig.drain()
    rig.assert_solo("c", [1], max_tokens=9, ignore_eos=True)
    rig.assert_solo("d", [1] * 20, max_tokens=3, ignore_eos=True)


def test_pages_that_a_failed_step_did_not_zero_are_taken_from_who_got_them():
    """While it was in flight, the next step was planned, with another's first tokens in them."""
    rig = Rig(num_pages=12)
    rig.add("alone", [1, 2], max_tokens=9, ignore_eos=True)
    rig.add("nan", [3, 4, 5], max_tokens=9, ignore_eos=True)
    rig.launch()
    rig.land(broken=[1])
    plan = rig.launch()
    innocent = rig.add("innocent", [6], max_tokens=9, ignore_eos=True)
    rig.launch()
    assert plan.scrub == innocent.pages
    rig.land(error=RuntimeError("a step that failed at once"), ran=False)
    rig.land()
    rig.drain()
    assert isinstance(rig.ended["nan"], NonFiniteError)
    assert isinstance(rig.ended["alone"], RuntimeError)
    rig.assert_solo("innocent", [6], max_tokens=9, ignore_eos=True)


def test_a_step_that_fails_is_computed_again_one_sequence_at_a_time():
    rig = Rig(num_pages=40, seqs=3, tokens=16)
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [6, 7], "waits": [8, 9]}
    for name, prompt in prompts.items():
        rig.add(name, prompt, max_tokens=10, ignore_eos=True)
    rig.launch()
    rig.launch()
    assert rig.land(error=RuntimeError("out of memory")) == []
    assert rig.launch() is None  # a step of the three is in flight: nothing of it counts
    assert rig.land() == []
    for name in "abc":
        plan = rig.launch()
        assert [row.sequence.request_id for row in plan.rows] == [name]
        assert rig.launch() is None
        rig.land()
    rig.drain()
    for name, prompt in prompts.items():
        rig.assert_solo(name, prompt, max_tokens=10, ignore_eos=True)


def test_the_sequence_that_fails_alone_ends_and_the_others_go_on():
    rig = Rig(num_pages=40, seqs=3, tokens=16)
    for name, prompt in {"a": [1, 2, 3], "b": [4, 5]}.items():
        rig.add(name, prompt, max_tokens=10, ignore_eos=True)
    rig.launch()
    rig.land(error=RuntimeError("a kernel"))
    rig.launch()
    rig.land(error=RuntimeError("a kernel"))
    assert str(rig.ended["a"]) == "a kernel"
    rig.drain()
    rig.assert_solo("b", [4, 5], max_tokens=10, ignore_eos=True)


def test_a_trial_waits_for_room_while_those_who_have_it_go_on():
    rig = Rig(num_pages=9, page_size=4, seqs=3, tokens=32)
    rig.add("a", [1] * 8, max_tokens=20, ignore_eos=True)
    rig.add("b", [2] * 8, max_tokens=10, ignore_eos=True)
    rig.launch()
    rig.land(error=RuntimeError("out of memory"))
    rig.drain()
    rig.assert_solo("a", [1] * 8, max_tokens=20, ignore_eos=True)
    rig.assert_solo("b", [2] * 8, max_tokens=10, ignore_eos=True)


def test_a_grammar_waits_for_its_last_token():
    rig = Rig(num_pages=40)
    rig.add("json", [1, 2], max_tokens=6, grammar="{}")
    rig.add("free", [3, 4], max_tokens=6, ignore_eos=True)
    rig.launch()
    plan = rig.launch()
    assert [row.sequence.request_id for row in plan.rows] == ["free"]
    rig.drain()
    rig.assert_solo("json", [1, 2], max_tokens=6)
    rig.assert_solo("free", [3, 4], max_tokens=6, ignore_eos=True)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, cancels, NaNs and failing steps at random moments in a tiny pool."""

    CACHING = True

    def __init__(self):
        super().__init__()
        self.rig = Rig(num_pages=8, page_size=2, seqs=3, tokens=5, model_len=12)
        self.rig.pool.caching = self.CACHING
        self.requests = {}
        self.dropped = set()

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=10),
        max_tokens=st.one_of(st.none(), st.integers(0, 8)),
        ignore_eos=st.booleans(),
        priority=st.sampled_from(["online", "online", "bulk"]),
        salt=st.sampled_from(["", "", "x"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        grammar=st.sampled_from([None, None, None, "{}"]),
    )
    def add(self, prompt, priority, ignore_eos, salt, **params):
        params |= {"cache_salt": salt, "ignore_eos": ignore_eos and params["grammar"] is None}
        request_id = len(self.requests)
        self.rig.add(request_id, prompt, priority, **params)
        self.requests[request_id] = prompt, params

    @rule(request_id=st.integers(0, 40))
    def cancel(self, request_id):
        if request_id in self.requests and request_id not in self.rig.ended:
            self.dropped.add(request_id)
        self.rig.scheduler.cancel(request_id)

    @precondition(lambda self: len(self.rig.flying) < 2)
    @rule()
    def launch(self):
        scheduler = self.rig.scheduler
        idle = not self.rig.flying
        queue = scheduler._running or scheduler._waiting
        oldest = queue[0] if queue else None
        plan = self.rig.launch()
        if idle and oldest is not None:
            assert any(row.sequence is oldest or row.sequence.on_trial for row in plan.rows), (
                "the oldest does not get on"
            )

    @precondition(lambda self: self.rig.flying)
    @rule()
    def land(self):
        self.rig.land()

    @precondition(lambda self: self.rig.flying)
    @rule(row=st.integers(0, 2))
    def land_with_nan(self, row):
        self.rig.land(broken=[row])

    @precondition(lambda self: self.rig.flying)
    @rule()
    def land_failed(self):
        self.rig.land(error=RuntimeError("a step that failed"))

    @precondition(lambda self: self.rig.flying)
    @rule()
    def land_unrun(self):
        self.rig.land(error=RuntimeError("a step that failed at once"), ran=False)

    @invariant()
    def sound(self):
        self.rig.scheduler.check()

    def teardown(self):
        self.rig.drain()
        for request_id, (prompt, params) in self.requests.items():
            if request_id in self.dropped:
                assert request_id not in self.rig.ended
            elif not isinstance(self.rig.ended[request_id], Exception):
                self.rig.assert_solo(request_id, prompt, **params)
                rows = [] if params["prompt_logprobs"] is None else list(range(len(prompt) - 1))
                assert self.rig.prompt_rows[request_id] == rows


class UncachedSchedulerMachine(SchedulerMachine):
    CACHING = False


class WaitingSchedulerMachine(SchedulerMachine):
    """The same where a prompt waits for the smallest page that another computes."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("rose.runtime.prefixes.WORTH_WAITING_FOR", 2)

    def teardown(self):
        super().teardown()
        self.patch.undo()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestUncachedScheduler = UncachedSchedulerMachine.TestCase
TestUncachedScheduler.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestWaitingScheduler = WaitingSchedulerMachine.TestCase
TestWaitingScheduler.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
