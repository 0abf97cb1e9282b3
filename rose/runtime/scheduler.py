"""Continuous batching: which tokens of which sequences the next step computes.

Plain Python. First come, first served: every step takes one token of each sequence that decodes,
then fills its token budget with chunks of prompts. A step is scheduled while the one before is
still running, so nothing here depends on the value of a token that is not known yet; tokens arrive
later by `complete`, and a sequence that turns out to have ended may have been scheduled once more.

Pages: a sequence gets the pages of its whole prompt when it is admitted, all or none, and one more
whenever a decoded token needs it. When there is none, the youngest sequence is preempted: it gives
up its pages, waits at its old place in the queue, and is computed again from its tokens. The oldest
is never preempted for another, so it always gets on. The pages of a sequence that leaves go back
when no step in flight uses them any more.

When a step fails as a whole, its sequences are computed again one by one, see
`rose.runtime.trials`. Models whose layers carry a state start from a cached prefix where that was
kept, see `rose.runtime.snapshots`; which positions are kept is chosen when a sequence is admitted.

The length limit of a sequence, prompt and output together, is the lesser of `max_model_len` and
the tokens that fit into the pool. A prompt is refused if it leaves no room for one output token; a
`max_tokens` beyond the limit is not an error, the sequence then ends by "length" at the limit.
"""

from bisect import insort
from collections.abc import Collection, Hashable
from collections.abc import Sequence as SequenceOf
from itertools import count
from operator import attrgetter

from rose.runtime.errors import RequestError
from rose.runtime.kv_cache import CachedPrefix, PagePool
from rose.runtime.options import Priority, SamplingParams
from rose.runtime.prefixes import Prefixes
from rose.runtime.sequence import Finish, Outcome, PlanRow, Sequence, Status, StepPlan
from rose.runtime.trials import Trials

BULK_HANDICAP = 256
"""Bulk work is served as if that many requests had come before it: later, but not never."""

SLOTS_PER_SEQUENCE = 2
"""Rows of the device's per-sequence state: those who leave keep theirs while a step uses it."""

_rank = attrgetter("rank")


class Scheduler:
    """Decides step by step, and keeps the sequences and their pages."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int,
        eos_ids: Collection[int] = (),
    ) -> None:
        """Schedule at most `max_num_seqs` sequences and `max_step_tokens` tokens a step.

        Raises:
            ValueError: a limit is below one, or a step cannot hold a token of every sequence.
        """
        if min(max_num_seqs, max_model_len) < 1 or max_step_tokens < max_num_seqs:
            raise ValueError(
                f"max_step_tokens is {max_step_tokens}, max_num_seqs {max_num_seqs} and "
                f"max_model_len {max_model_len}: each must be at least 1, and max_step_tokens at "
                "least max_num_seqs"
            )
        self.pool = pool
        self.max_len = min(max_model_len, pool.capacity)
        self.preemptions = 0
        self.hit_tokens = 0
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._eos_ids = frozenset(eos_ids)
        self._arrivals = count()
        self._alive: dict[Hashable, Sequence] = {}
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._leaving: set[Sequence] = set()  # left, but a step in flight uses their pages
        self._slots = list(range(self.num_slots - 1, -1, -1))
        self._prefixes = Prefixes(pool)
        self._trials = Trials(pool)

    @property
    def num_slots(self) -> int:
        """Rows that the device's per-sequence state needs."""
        return SLOTS_PER_SEQUENCE * self._max_num_seqs

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for pages or a place."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._alive)

    def add(
        self,
        request_id: Hashable,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        priority: Priority = "online",
    ) -> Sequence:
        """Queue a sequence.

        Raises:
            RequestError: the prompt is empty or can never be served, or the id is in use.
        """
        if request_id in self._alive:
            raise RequestError(f"request {request_id!r} is in progress already", "request_id")
        room = self._room(len(prompt_ids), params)
        sequence = Sequence(
            request_id=request_id,
            prompt_len=len(prompt_ids),
            token_ids=list(prompt_ids),
            params=params,
            max_outputs=room if params.max_tokens is None else min(room, params.max_tokens),
            end_ids=self._end_ids(params),
            rank=next(self._arrivals) + (BULK_HANDICAP if priority == "bulk" else 0),
            priority=priority,
            parent=params.cache_salt,
        )
        self._alive[request_id] = sequence
        insort(self._waiting, sequence, key=_rank)
        return sequence

    def cancel(self, request_id: Hashable) -> None:
        """Drop a sequence, whatever its state. An unknown or finished one is no error."""
        sequence = self._alive.get(request_id)
        if sequence is not None:
            self._leave(sequence, Status.FINISHED)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if no sequence can get on before a step in flight is done."""
        plan = StepPlan()
        trial = self._find_trial()
        if trial is None:
            self._schedule_all(plan)
        elif not trial.in_flight:
            self._take_up(plan, trial, self._max_step_tokens)
        if not plan.rows:
            return None
        plan.scrub.extend(self._trials.take_scrub())
        return plan

    def complete(
        self, plan: StepPlan, results: SequenceOf[int | Exception | None]
    ) -> list[Outcome]:
        """Take in a step's results: for each row its token, None if it samples none, or an error.

        Steps complete in the order in which they were scheduled.
        """
        outcomes = []
        for index, (row, result) in enumerate(zip(plan.rows, results, strict=True)):
            outcome = self._take(index, row, result)
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def fail(self, plan: StepPlan, error: Exception) -> list[Outcome]:
        """Take in that a step failed as a whole.

        A sequence that was alone in it ends by `error`; several are computed again, one by one. So
        are those that were given pages which it was to zero.
        """
        self._set_back_holders(plan)
        if len(plan.rows) == 1:
            return self.complete(plan, [error])
        for row in plan.rows:
            self._set_back(row.sequence, is_wanted=row.is_wanted)
            self._land(row)
        return []

    def check(self) -> None:
        """Assert every invariant of the sequences, the slots and the pool."""
        holders = {*self._running, *self._leaving}
        self.pool.check(page for sequence in holders for page in sequence.pages)
        slots = [s.slot for s in holders]
        assert sorted([*self._slots, *(s for s in slots if s is not None)]) == list(
            range(self.num_slots)
        ), "a slot is lost or shared"
        for queue, status in ((self._waiting, Status.WAITING), (self._running, Status.RUNNING)):
            assert queue == sorted(queue, key=_rank), f"{status} is out of order"
            assert all(s.status is status for s in queue)
        assert {*self._waiting, *self._running} == set(self._alive.values())
        for sequence in self._running:
            assert sequence.computed <= len(sequence.pages) * self.pool.page_size
        for sequence in set(self._waiting) - self._leaving:
            assert (sequence.pages, sequence.computed, sequence.in_flight) == ([], 0, 0)
        assert all(s.in_flight for s in self._leaving), "pages were not given back"
        assert all(s.snapshot is None for s in holders), "a snapshot was not used"
        if self.pool.snapshots is not None and not any(s.in_flight for s in holders):
            assert self.pool.snapshots.num_reserved == 0, "a row was not given back"

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return what ends a sequence. A grammar ends by an end token, so it needs them."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos and params.grammar is None else own | self._eos_ids

    def _room(self, prompt_len: int, params: SamplingParams) -> int:
        """Return how many output tokens fit behind a prompt; refuse one that never fits."""
        needed = 0 if params.max_tokens == 0 else 1
        room = self.max_len - prompt_len
        if prompt_len == 0:
            raise RequestError("the prompt has no tokens", "prompt")
        if room < needed:
            limit = (
                f"the model's {self._max_model_len}"
                if self.max_len == self._max_model_len
                else f"the {self.max_len} that fit into the KV cache"
            )
            raise RequestError(
                f"the prompt has {prompt_len} tokens, which with {needed} of output is more than "
                f"{limit}",
                "prompt",
            )
        return room

    def _find_trial(self) -> Sequence | None:
        """Return the sequence that has to run alone now, let in if there is room for it."""
        for sequence in self._running:
            if sequence.on_trial:
                return sequence
        return self._let_in() if self._waiting and self._waiting[0].on_trial else None

    def _schedule_all(self, plan: StepPlan) -> None:
        """Take what fits of every sequence."""
        preemptions = self.preemptions
        self._schedule_decodes(plan)
        partial = [sequence for sequence in self._running if sequence.remaining > 1]
        reserved = self._reserve(plan, partial)
        if self.preemptions == preemptions:
            self._admit(plan, self._max_step_tokens - plan.num_tokens - reserved)
        self._schedule_chunks(plan, partial, reserved)

    def _schedule_decodes(self, plan: StepPlan) -> None:
        """Take the next token of every sequence that has one left to compute, oldest first."""
        for sequence in self._running.copy():
            if sequence.status is not Status.RUNNING:  # preempted for an older one
                continue
            if sequence.remaining == 1 and sequence.schedulable and self._grow(sequence):
                self._take_up(plan, sequence, 1)

    def _reserve(self, plan: StepPlan, partial: list[Sequence]) -> int:
        """Return the tokens that the oldest partly computed prompt has for certain.

        That is half of what decodes leave: it goes on, and a short prompt need not wait for it.
        """
        half = (self._max_step_tokens - plan.num_tokens + 1) // 2
        return min(half, partial[0].remaining) if partial else 0

    def _schedule_chunks(self, plan: StepPlan, partial: list[Sequence], reserved: int) -> None:
        """Go on with prompts that are partly computed: those with the least left, then the oldest.

        What the others leave is for the oldest.
        """
        for sequence in sorted(partial[1:], key=lambda sequence: sequence.remaining):
            if (budget := self._max_step_tokens - plan.num_tokens - reserved) > 0:
                self._take_up(plan, sequence, budget)
        if partial and (budget := self._max_step_tokens - plan.num_tokens) > 0:
            self._take_up(plan, partial[0], budget)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Let sequences in from the head of the queue while there is room; nobody overtakes."""
        while self._waiting and budget > 0 and not self._waiting[0].on_trial:
            sequence = self._let_in()
            if sequence is None:
                break
            budget -= self._take_up(plan, sequence, budget)

    def _let_in(self) -> Sequence | None:
        """Let the head of the queue in and return it, if there is room."""
        sequence = self._waiting[0]
        if len(self._running) == self._max_num_seqs or not self._slots:
            return None
        if sequence in self._leaving:
            return None
        prefix = self._prefixes.find(sequence)
        if self._prefixes.is_coming(sequence, prefix, self._running) or not self._place(
            sequence, prefix
        ):
            return None
        del self._waiting[0]
        insort(self._running, sequence, key=_rank)
        sequence.status = Status.RUNNING
        sequence.slot = self._slots.pop()
        self._prefixes.choose_marks(sequence, prefix, self._waiting)
        return sequence

    def _place(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Share the pages found and allocate the rest; False, and no change, if too few.

        One page stays free for each running sequence to grow into, lest the newcomer be preempted
        in the next step.
        """
        tokens = sequence.token_ids
        needed = self.pool.pages_for(len(tokens)) - len(prefix.pages)
        taken = needed + self.pool.count_idle(prefix.pages)
        if taken + len(self._running) > self.pool.available:
            return False
        self.pool.share(prefix.pages)
        fresh = self.pool.allocate(needed)
        assert fresh is not None, "available pages could not be allocated"
        sequence.pages = prefix.pages + fresh
        sequence.registered = len(prefix.pages)
        sequence.parent = prefix.parent
        sequence.computed = len(prefix.pages) * self.pool.page_size
        sequence.snapshot = prefix.snapshot
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            self.hit_tokens += sequence.computed
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure that the next token has a place; False if it has to wait for one."""
        if sequence.computed < len(sequence.pages) * self.pool.page_size:
            return True
        while (page := self.pool.allocate(1)) is None:
            if self._leaving or any(other.exhausted for other in self._running):
                return False  # pages are on their way back
            victim = self._running[-1]
            assert victim is not self._running[0], "one sequence alone does not fit into the pool"
            self.preemptions += 1
            self._leave(victim, Status.WAITING)
            insort(self._waiting, victim, key=_rank)
            if victim is sequence:
                return False
        sequence.pages += page
        return True

    def _take_up(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        """Put the next tokens of a sequence into the plan; return how many."""
        num_tokens = self._prefixes.cut(sequence, budget)
        start, end = sequence.computed, sequence.computed + num_tokens
        samples = num_tokens == sequence.remaining and sequence.max_outputs > 0
        prompt_rows = range(0)
        if sequence.params.prompt_logprobs is not None:
            prompt_rows = range(max(start, sequence.prompt_rows), min(end, sequence.prompt_len - 1))
            sequence.prompt_rows = max(sequence.prompt_rows, prompt_rows.stop)
        plan.rows.append(
            PlanRow(
                sequence=sequence,
                start=start,
                num_tokens=num_tokens,
                output_index=sequence.num_outputs if samples else None,
                prompt_rows=prompt_rows,
                is_known=end <= len(sequence.token_ids),
                attempt=sequence.attempt,
                snapshot=sequence.snapshot,
                kept=self._prefixes.keep(sequence, end),
            )
        )
        sequence.snapshot = None
        sequence.computed = end
        sequence.pending += samples
        sequence.in_flight += 1
        return num_tokens

    def _take(self, index: int, row: PlanRow, result: int | Exception | None) -> Outcome | None:
        """Take in the result of one row; None if nobody waits for it.

        Its pages may hold NaN also then.
        """
        outcome = None
        if row.is_wanted:
            outcome = self._advance(index, row, result)
        elif isinstance(result, Exception):
            self._trials.distrust(row.sequence)
        self._land(row)
        return outcome

    def _set_back_holders(self, plan: StepPlan) -> None:
        """Let those start again that hold a page which a failed step perhaps did not zero.

        The step itself sees to its own.
        """
        held = self._trials.scrub_again(plan)
        own = {row.sequence for row in plan.rows}
        for sequence in {*self._running, *self._leaving} - own:
            if not held.isdisjoint(sequence.pages):
                self._set_back(sequence, is_wanted=sequence.status is not Status.FINISHED)

    def _set_back(self, sequence: Sequence, *, is_wanted: bool) -> None:
        """Let a sequence start again from its tokens, on trial, if anybody waits for it."""
        if is_wanted:
            self._trials.begin(sequence)
            if sequence.status is Status.RUNNING:
                self._leave(sequence, Status.WAITING)
                insort(self._waiting, sequence, key=_rank)
        else:
            self._trials.distrust(sequence)

    def _land(self, row: PlanRow) -> None:
        """Note that a step in flight is done for a sequence."""
        sequence = row.sequence
        sequence.in_flight -= 1
        self._prefixes.settle(row)
        if row.attempt != sequence.attempt and row.prompt_rows:
            sequence.prompt_rows = min(sequence.prompt_rows, row.prompt_rows.start)
        if sequence in self._leaving and sequence.in_flight == 0:
            self._give_back(sequence)

    def _advance(self, index: int, row: PlanRow, result: int | Exception | None) -> Outcome:
        sequence = row.sequence
        if isinstance(result, Exception):
            self._trials.distrust(sequence)
            self._leave(sequence, Status.FINISHED)
            return Outcome(index, sequence, None, error=result)
        self._prefixes.register(row)
        finish: Finish | None = None
        if result is not None:
            sequence.on_trial = False
            finish = sequence.append(result)
        elif sequence.max_outputs == 0 and row.end == sequence.prompt_len:
            finish = "length"
        if finish is not None:
            self._leave(sequence, Status.FINISHED)
        return Outcome(index, sequence, result, finish)

    def _leave(self, sequence: Sequence, status: Status) -> None:
        """Take a sequence out of its queue; its pages go back now or after the steps in flight."""
        queue = self._running if sequence.status is Status.RUNNING else self._waiting
        queue.remove(sequence)
        sequence.status = status
        if status is Status.FINISHED:
            del self._alive[sequence.request_id]
        if sequence.in_flight:
            self._leaving.add(sequence)
        else:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Release what a sequence holds, and let it start again from its tokens."""
        self._leaving.discard(sequence)
        self._trials.release(sequence)
        if sequence.slot is not None:
            self._slots.append(sequence.slot)
        sequence.slot = None
        sequence.pages = []
        sequence.snapshot = None
        sequence.marks = set()
        sequence.kept = []
        sequence.computed = sequence.registered = 0
        sequence.parent = sequence.params.cache_salt
