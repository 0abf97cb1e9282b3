"""The generation loop: ties scheduler and decode runtime together, step by step.

It has no thread and no event loop of its own. Its owner calls `advance` to launch steps, waits for
the oldest in flight in whatever way suits it, and calls `collect` for what has arrived.
"""

from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rose.runtime.decode import DecodeRuntime, StepResult, TokenLogprob
from rose.runtime.errors import RequestError
from rose.runtime.lazy import LazyTensor
from rose.runtime.options import Priority, SamplingParams
from rose.runtime.scheduler import Scheduler
from rose.runtime.sequence import Finish, Outcome, Sequence, StepPlan
from rose.runtime.structured import GrammarCompiler, GrammarMatcher


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of a sequence.

    `finish` is "stop" (an end token, the last of `token_ids`) or "length", None while it goes on.
    `logprobs` has an entry per token where the request asked. `prompt_logprobs` comes with the
    first delta: an entry per prompt token but the first. `cached_tokens` of the prompt were found
    in the prefix cache.
    """

    request_id: Hashable
    token_ids: list[int]
    finish: Finish | None
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob] | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence ended by a `RequestError`, a `NonFiniteError`, or a fault of a step of its own."""

    request_id: Hashable
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Gauges and counters since the start. `tokens` counts those fed, prompts included."""

    steps: int
    tokens: int
    sequences_running: int
    sequences_waiting: int
    kv_pages_used: int
    kv_pages_total: int
    prefix_hit_tokens: int
    preemptions: int


class _Flight(NamedTuple):
    plan: StepPlan
    lazy: LazyTensor[StepResult]


class GenerationLoop:
    """Sequences in, tokens out. To be used from one thread."""

    def __init__(
        self,
        runtime: DecodeRuntime,
        scheduler: Scheduler,
        *,
        grammars: GrammarCompiler | None = None,
        max_in_flight: int = 2,
        on_arrival: Callable[[], None] | None = None,
    ) -> None:
        """Run what `scheduler` plans on `runtime`.

        `on_arrival` is called, from whichever thread, whenever there is something to collect.

        With two steps in flight the device finds the next one ready when it ends one. With one,
        no step is in vain when a sequence ends, and a newcomer waits for one step less.
        """
        pool = scheduler.pool
        stateless = pool.caching and pool.snapshots is None
        assert not (runtime.has_states and stateless), "no prefix has its state"
        self._runtime = runtime
        self._scheduler = scheduler
        self._grammars = grammars
        self._max_in_flight = max_in_flight
        self._on_arrival = on_arrival
        self._flights: deque[_Flight] = deque()
        self._alive: dict[Hashable, Sequence] = {}
        self._prompt_logprobs: dict[Sequence, list[TokenLogprob]] = {}
        self._unreported: list[Failed] = []
        self._steps = 0
        self._tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished, a step in flight, or something left to collect."""
        return bool(self._alive or self._flights or self._unreported)

    @property
    def max_len(self) -> int:
        """Tokens, prompt and output, that one sequence can have at most."""
        return self._scheduler.max_len

    def add(
        self,
        request_id: Hashable,
        prompt_ids: SequenceOf[int] | npt.NDArray[np.integer],
        params: SamplingParams,
        priority: Priority = "online",
        grammar: GrammarMatcher | None = None,
    ) -> None:
        """Queue a sequence.

        Args:
            request_id: names it in `cancel` and in what `collect` returns.
            prompt_ids: token ids [prompt length].
            params: how tokens are chosen, and when it ends.
            priority: "bulk" gives way to "online".
            grammar: the matcher of `params.grammar`, where the caller has compiled it already.

        Raises:
            RequestError: it can never be served; `field` names what is wrong.
        """
        ids = np.asarray(prompt_ids, np.int64)
        vocab_size = self._runtime.vocab_size
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        if bad.size:
            raise RequestError(
                f"the prompt holds token {bad[0]}; ids from 0 to {vocab_size - 1} are possible",
                "prompt",
            )
        if params.grammar is not None and grammar is None:
            grammar = self._compile(params.grammar)
        if grammar is not None:
            grammar.mask()  # raises, if ever, here and not in the step
        sequence = self._scheduler.add(request_id, ids.tolist(), params, priority)
        sequence.grammar = grammar
        self._runtime.start(sequence)
        self._alive[request_id] = sequence
        if params.prompt_logprobs is not None:
            self._prompt_logprobs[sequence] = []  # until the first delta

    def cancel(self, request_id: Hashable) -> None:
        """Drop a sequence: nothing more comes of it. An unknown or finished one is no error."""
        sequence = self._alive.get(request_id)
        if sequence is not None:
            self._scheduler.cancel(request_id)
            self._forget(sequence)

    def advance(self) -> bool:
        """Launch the next step if there is work and room for it; say whether one was launched."""
        if len(self._flights) >= self._max_in_flight:
            return False
        plan = self._scheduler.schedule()
        if plan is None:
            return False
        try:
            lazy = self._runtime.step(plan)
        except Exception as error:  # noqa: BLE001 - the scheduler finds out whose it is
            self._unreported += self._fail(plan, error)
            if self._on_arrival is not None:
                self._on_arrival()
            return True
        self._flights.append(_Flight(plan, lazy))
        if self._on_arrival is not None:
            lazy.add_done_callback(self._on_arrival)
        self._steps += 1
        self._tokens += plan.num_tokens
        return True

    def collect(self, timeout: float | None = 0) -> list[Delta | Failed]:
        """Take in the steps that have arrived, and return what they brought.

        Args:
            timeout: seconds to wait for the oldest step in flight; None waits as long as it takes.
        """
        events: list[Delta | Failed] = [*self._unreported]
        self._unreported.clear()
        if self._flights and not events and timeout != 0:
            with suppress(Exception):  # a timeout is no error; one of the step is read below
                self._flights[0].lazy.result(timeout)
        while self._flights and self._flights[0].lazy.done():
            events += self._land(self._flights.popleft())
        return events

    async def arrival(self) -> None:
        """Wait until the oldest step in flight has arrived, for `collect` to read."""
        if self._flights:
            with suppress(Exception):  # an error of the step is read by `collect`
                await self._flights[0].lazy

    def stats(self) -> GenerationStats:
        """Return the numbers of this moment."""
        pool = self._scheduler.pool
        return GenerationStats(
            steps=self._steps,
            tokens=self._tokens,
            sequences_running=self._scheduler.num_running,
            sequences_waiting=self._scheduler.num_waiting,
            kv_pages_used=pool.used,
            kv_pages_total=pool.usable_pages,
            prefix_hit_tokens=self._scheduler.hit_tokens,
            preemptions=self._scheduler.preemptions,
        )

    def _compile(self, schema: str) -> GrammarMatcher:
        if self._grammars is None:
            raise RequestError("this model does not offer structured output", "response_format")
        return self._grammars.matcher(schema)

    def _land(self, flight: _Flight) -> list[Delta | Failed]:
        try:
            result = flight.lazy.result()
        except Exception as error:  # noqa: BLE001 - the scheduler finds out whose it is
            return [*self._fail(flight.plan, error)]
        self._follow_grammars(flight.plan, result)
        outcomes = self._scheduler.complete(flight.plan, result.tokens)
        return [event for outcome in outcomes for event in self._report(outcome, result)]

    def _follow_grammars(self, plan: StepPlan, result: StepResult) -> None:
        """Take the new tokens through their grammars; one that cannot go on fails its sequence."""
        for index, row in enumerate(plan.rows):
            grammar, token = row.sequence.grammar, result.tokens[index]
            if grammar is None or not isinstance(token, int) or not row.is_wanted:
                continue
            try:
                grammar.advance(token)
            except RequestError as error:
                result.tokens[index] = error

    def _fail(self, plan: StepPlan, error: Exception) -> list[Failed]:
        outcomes = self._scheduler.fail(plan, error)
        for outcome in outcomes:
            self._forget(outcome.sequence)
        return [Failed(outcome.sequence.request_id, error) for outcome in outcomes]

    def _report(self, outcome: Outcome, result: StepResult) -> list[Delta | Failed]:
        """Turn what came for a sequence into an event, if there is anything to tell."""
        sequence = outcome.sequence
        if outcome.error is not None:
            self._forget(sequence)
            return [Failed(sequence.request_id, outcome.error)]
        if sequence in self._prompt_logprobs:
            self._prompt_logprobs[sequence] += result.prompt_logprobs[outcome.row]
        if outcome.token_id is None and outcome.finish is None:
            return []
        logprob = result.logprobs[outcome.row]
        delta = Delta(
            request_id=sequence.request_id,
            token_ids=[] if outcome.token_id is None else [outcome.token_id],
            finish=outcome.finish,
            logprobs=None if logprob is None else [logprob],
            prompt_logprobs=self._prompt_logprobs.pop(sequence, None),
            cached_tokens=sequence.cached_tokens or 0,
        )
        if outcome.finish is not None:
            self._forget(sequence)
        return [delta]

    def _forget(self, sequence: Sequence) -> None:
        del self._alive[sequence.request_id]
        self._prompt_logprobs.pop(sequence, None)
        self._runtime.release(sequence)
