"""Generation inside the engine process: feeds the generation loop and delivers what it brings."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rose.runtime.build import Generation
from rose.runtime.decode import TokenLogprob
from rose.runtime.errors import RequestError
from rose.runtime.faults import is_lasting
from rose.runtime.generation import Delta, Failed, GenerationLoop
from rose.runtime.options import Priority, SamplingParams
from rose.runtime.structured import GrammarMatcher
from rose.serving.embed_service import OverloadedError
from rose.serving.protocol import TokenLogprobs, TokensDelta
from rose.serving.turns import Turns

MAX_REQUESTS = 4096
MAX_LOGPROBS = 128


class Key(NamedTuple):
    """Names a request: the client's identity, and the number that the client gave it."""

    client: bytes
    request_id: int


DeliverTokens = Callable[[bytes, list[TokensDelta]], None]
DeliverFailure = Callable[[Key, Exception], None]


class GenerateService:
    """Keeps the decode runtime busy, and delivers tokens step by step, per client."""

    def __init__(
        self,
        generation: Generation,
        deliver_tokens: DeliverTokens,
        deliver_failure: DeliverFailure,
    ) -> None:
        """Serve a decode runtime."""
        self._grammars = generation.grammars
        self._deliver_tokens = deliver_tokens
        self._deliver_failure = deliver_failure
        self._compiling: dict[Key, asyncio.Task[None]] = {}
        self._turns = Turns(self._advance)
        self._generation = generation.make_loop(on_arrival=self._turns.ask_from_thread)
        self._requests: set[Key] = set()

    @property
    def requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def queued(self) -> int:
        """Of these, how many wait for their first step, or for pages to go on."""
        return len(self._compiling) + self._generation.stats().sequences_waiting

    @property
    def loop(self) -> GenerationLoop:
        """The loop, for its numbers."""
        return self._generation

    def submit(
        self,
        key: Key,
        ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        priority: Priority,
    ) -> None:
        """Admit a request.

        Raises:
            RequestError: it can never be served.
            OverloadedError: too many wait.
        """
        _check(sampling)
        if len(self._requests) >= MAX_REQUESTS:
            raise OverloadedError("the queue of the engine is full")
        if sampling.grammar is None:
            self._add(key, ids, sampling, priority, None)
        else:
            work = self._compile_and_add(key, ids, sampling, priority)
            self._compiling[key] = asyncio.create_task(work)
        self._requests.add(key)

    def cancel(self, key: Key) -> None:
        """Drop a request; nothing is delivered for it any more."""
        if key in self._requests:
            self._requests.discard(key)
            if (task := self._compiling.pop(key, None)) is not None:
                task.cancel()
            self._generation.cancel(key)
            self._turns.ask()

    async def run(self) -> None:
        """Launch and collect steps until cancelled.

        Raises:
            RuntimeError: the device is lost.
        """
        await self._turns.run()

    def _advance(self) -> None:
        self._publish(self._generation.collect())
        while self._generation.advance():
            pass

    def _add(
        self,
        key: Key,
        ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        priority: Priority,
        grammar: GrammarMatcher | None,
    ) -> None:
        self._generation.add(key, ids, sampling, priority, grammar)
        self._turns.ask()

    async def _compile_and_add(
        self, key: Key, ids: npt.NDArray[np.int32], sampling: SamplingParams, priority: Priority
    ) -> None:
        """Compile the grammar in a thread: the first one takes a second."""
        assert sampling.grammar is not None
        try:
            grammar = await asyncio.to_thread(self._grammars.matcher, sampling.grammar)
            self._add(key, ids, sampling, priority, grammar)
        except Exception as error:  # noqa: BLE001 - it is the request's answer
            self._requests.discard(key)
            self._deliver_failure(key, error)
        finally:
            self._compiling.pop(key, None)

    def _publish(self, events: list[Delta | Failed]) -> None:
        """Deliver what steps brought: tokens first, since a failure is the last of its request."""
        deltas: dict[bytes, list[TokensDelta]] = {}
        failures: list[tuple[Key, Exception]] = []
        for event in events:
            key = event.request_id
            assert isinstance(key, Key)
            if isinstance(event, Failed):
                failures.append((key, event.error))
            else:
                deltas.setdefault(key.client, []).append(_on_the_wire(key, event))
            if isinstance(event, Failed) or event.finish is not None:
                self._requests.discard(key)
        for client, found in deltas.items():
            self._deliver_tokens(client, found)
        for key, error in failures:
            self._deliver_failure(key, error)
        if lasting := next((error for _, error in failures if is_lasting(error)), None):
            raise lasting


def _check(sampling: SamplingParams) -> None:
    """Check what would hurt others if it were wrong; the gateway has checked it nicely."""
    for name in ("max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and value < 0:
            raise RequestError(f"{name} is {value}, it cannot be less than 0", name)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, name) or 0) > MAX_LOGPROBS:
            raise RequestError(f"{name} can be {MAX_LOGPROBS} at most", name)


def _on_the_wire(key: Key, delta: Delta) -> TokensDelta:
    return TokensDelta(
        request_id=key.request_id,
        token_ids=delta.token_ids,
        finish=delta.finish,
        logprobs=_logprobs(delta.logprobs),
        prompt_logprobs=_logprobs(delta.prompt_logprobs),
        cached_tokens=delta.cached_tokens,
    )


def _logprobs(entries: list[TokenLogprob] | None) -> list[TokenLogprobs] | None:
    if entries is None:
        return None
    return [TokenLogprobs(e.token_id, e.logprob, e.top_ids, e.top_logprobs) for e in entries]
