"""Generation in this process: prompts through the loop, tokens back into text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt

from rose.runtime.build import Generation
from rose.runtime.decode import TokenLogprob
from rose.runtime.generation import Delta, Failed
from rose.runtime.options import SamplingParams
from rose.serving.gateway.detokenization import IncrementalDetokenizer, StopStrings, TokenTable

Ids = npt.NDArray[np.int32]

SEQUENCES_AHEAD = 64  # kept in the loop, so that it never waits for the next prompt


@dataclass(slots=True)
class Completion:
    """The continuation of one prompt.

    `finish_reason` is "stop" (an end token or a stop string) or "length". `token_ids` includes the
    end token. `logprobs` has an entry per token, and `prompt_logprobs` one per prompt token but the
    first, where the request asked for them. `cached_tokens` of the prompt came from the prefix
    cache.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class _Output:
    """What has come of a prompt so far."""

    prompt_tokens: int
    text: IncrementalDetokenizer
    stops: StopStrings
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0

    def take(self, delta: Delta) -> str:
        """Take a step's tokens; returns the text that is certain by now."""
        self.token_ids += delta.token_ids
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *delta.logprobs]
        text = self.stops.push(self.text.push(delta.token_ids))
        if delta.finish is not None and self.stops.matched is None:
            text += self.stops.push(self.text.finish())
        if delta.finish is not None and self.stops.matched is None:
            text += self.stops.finish()
        self.pieces.append(text)
        return text

    def complete(self, finish: Literal["stop", "length"] | None) -> Completion:
        return Completion(
            text="".join(self.pieces),
            token_ids=self.token_ids,
            finish_reason="stop" if self.stops.matched is not None else finish or "stop",
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class LocalGenerator:
    """Runs prompts through a decode runtime that this process owns."""

    def __init__(self, generation: Generation, table: TokenTable) -> None:
        """Make the loop over `generation`."""
        self._loop = generation.make_loop()
        self._table = table
        self._next_id = 0

    def run(
        self, prompts: Sequence[Ids], params: SamplingParams, stop: Sequence[str]
    ) -> Iterator[tuple[int, Completion | Exception]]:
        """Continue prompts, many at a time; yields each as it ends, with its index.

        Closing the iterator cancels what is under way.
        """
        outputs: dict[int, tuple[int, _Output]] = {}
        queue = enumerate(prompts)
        try:
            while True:
                for index, ids in islice(queue, SEQUENCES_AHEAD - len(outputs)):
                    try:
                        request_id = self._add(ids, params)
                    except ValueError as error:
                        yield index, error
                    else:
                        outputs[request_id] = index, self._output(ids, stop)
                if not outputs:
                    break
                for event in self._step():
                    yield from self._ended(event, outputs)
        finally:
            self._cancel(list(outputs))

    def stream(self, ids: Ids, params: SamplingParams, stop: Sequence[str]) -> Iterator[str]:
        """Continue one prompt; yields its text piece by piece.

        Raises:
            RequestError: it can never be served.
        """
        request_id = self._add(ids, params)
        output = self._output(ids, stop)
        try:
            while True:
                for event in self._step():
                    if isinstance(event, Failed):
                        raise event.error
                    if text := output.take(event):
                        yield text
                    if event.finish is not None or output.stops.matched is not None:
                        return
        finally:
            self._cancel([request_id])

    def _add(self, ids: Ids, params: SamplingParams) -> int:
        self._next_id += 1
        self._loop.add(self._next_id, ids, params)
        return self._next_id

    def _output(self, ids: Ids, stop: Sequence[str]) -> _Output:
        return _Output(len(ids), IncrementalDetokenizer(self._table), StopStrings(stop))

    def _step(self) -> list[Delta | Failed]:
        while self._loop.advance():
            pass
        return self._loop.collect(None)

    def _ended(
        self, event: Delta | Failed, outputs: dict[int, tuple[int, _Output]]
    ) -> Iterator[tuple[int, Completion | Exception]]:
        request_id = event.request_id
        assert isinstance(request_id, int)
        if request_id not in outputs:
            return  # cancelled meanwhile
        index, output = outputs[request_id]
        if isinstance(event, Failed):
            del outputs[request_id]
            yield index, event.error
            return
        output.take(event)
        if event.finish is not None or output.stops.matched is not None:
            del outputs[request_id]
            self._loop.cancel(request_id)
            yield index, output.complete(event.finish)

    def _cancel(self, request_ids: Sequence[int]) -> None:
        """Cancel, and wait for the steps in flight, so that nothing of them comes later."""
        for request_id in request_ids:
            self._loop.cancel(request_id)
        while self._loop.has_work:
            self._loop.collect(None)
