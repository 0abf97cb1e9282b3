"""Generation in this process: prompts through the loop, tokens back into text."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rose.runtime.build import Generation
from rose.runtime.decode import TokenLogprob
from rose.runtime.errors import RequestError
from rose.runtime.generation import Delta, Failed
from rose.runtime.options import SamplingParams
from rose.runtime.sequence import Finish
from rose.serving.gateway.detokenization import IncrementalDetokenizer, StopStrings, TokenTable
from rose.serving.interrupts import interrupts_held

Ids = npt.NDArray[np.int32]

_LEAST_POSITIVE = 5e-324
_RANGES = {
    "max_tokens": (0, inf),
    "min_tokens": (0, inf),
    "temperature": (0, 1e30),
    "top_k": (-1, inf),
    "top_p": (_LEAST_POSITIVE, 1),
    "min_p": (0, 1),
    "repetition_penalty": (_LEAST_POSITIVE, 1e30),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logprobs": (0, inf),
    "prompt_logprobs": (0, inf),
}


class ChatPrompt(list[int]):
    """Token ids of a conversation: what comes after them begins a text, as `context` has it."""


class Request(NamedTuple):
    """A prompt to continue, and how.

    `context` are the last of its ids where the output goes on in their text, none where it begins
    a text of its own: the decoders of some tokenizers drop a blank at the beginning of a text.
    """

    ids: Ids
    params: SamplingParams
    context: Sequence[int] = ()


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
    finish_reason: Finish
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True, kw_only=True)
class _Output:
    """What has come of a prompt so far; it has ended with `finish` or `error`."""

    request_id: int
    prompt_tokens: int
    min_tokens: int
    detokenizer: IncrementalDetokenizer
    stops: StopStrings
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    finish: Finish | None = None
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def take(self, delta: Delta) -> None:
        """Take a step's tokens."""
        self.token_ids += delta.token_ids
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *delta.logprobs]
        self.pieces.append(self._text_of(delta))
        self.finish = delta.finish if self.stops.matched is None else "stop"

    def _text_of(self, delta: Delta) -> str:
        """Return the text that is certain by now. The token that ends an output has none."""
        shown = delta.token_ids[:-1] if delta.finish == "stop" else delta.token_ids
        text = self.detokenizer.push(shown)
        if len(self.token_ids) >= self.min_tokens:  # before, text is not searched
            text = self.stops.push(text)
        if delta.finish is not None:
            text += self.stops.push(self.detokenizer.finish()) + self.stops.finish()
        return text

    def complete(self) -> Completion | Exception:
        """Return how it ended."""
        if self.error is not None:
            return self.error
        assert self.finish is not None
        return Completion(
            text="".join(self.pieces),
            token_ids=self.token_ids,
            finish_reason=self.finish,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class LocalGenerator:
    """Runs prompts through a decode runtime that this process owns.

    Runs and streams may be open side by side, in one thread: a step serves them all.
    """

    def __init__(self, generation: Generation, table: TokenTable) -> None:
        """Make the loop over `generation`."""
        self._loop = generation.make_loop()
        self._grammars = generation.grammars
        # More than run at one time: the next ones stand ready when some end.
        self._ahead = generation.scheduler.num_slots
        self._table = table
        self._alive: dict[int, _Output] = {}
        self._next_id = 0

    def check(self, params: SamplingParams) -> None:
        """Check parameters that prompts are to be continued with.

        Raises:
            RequestError: one is out of range, or the grammar cannot be used.
        """
        _check_ranges(params)
        if params.grammar is not None:
            self._grammars.matcher(params.grammar)

    def run(
        self,
        requests: Iterable[Request | Exception],
        stop: Sequence[str],
        on_tokens: Callable[[int], None] | None = None,
    ) -> Generator[tuple[int, Completion | Exception], None, None]:
        """Continue prompts, many at a time; yields each as it ends, with its index.

        Requests are taken as there is room; an exception among them is yielded as its own outcome.
        `on_tokens` is called with the number of new tokens of a step. Closing the iterator cancels
        what is under way.
        """
        outputs: dict[int, _Output] = {}
        queue = enumerate(requests)
        try:
            while True:
                yield from self._fill(queue, outputs, stop)
                if not outputs:
                    break
                tokens = self._turn()
                if on_tokens is not None:
                    on_tokens(tokens)
                for index in [i for i, output in outputs.items() if output.ended]:
                    yield index, outputs.pop(index).complete()
        finally:
            self._drop(outputs.values())

    def stream(self, request: Request, stop: Sequence[str]) -> Generator[str, None, None]:
        """Continue one prompt; yields its text piece by piece.

        Raises:
            RequestError: it can never be served.
        """
        output = self._start(request, stop)
        shown = 0
        try:
            while not output.ended or shown < len(output.pieces):
                if shown == len(output.pieces):
                    self._turn()
                new, shown = output.pieces[shown:], len(output.pieces)
                if text := "".join(new):
                    yield text
            if output.error is not None:
                raise output.error
        finally:
            self._drop([output])

    def _fill(
        self,
        queue: Iterator[tuple[int, Request | Exception]],
        outputs: dict[int, _Output],
        stop: Sequence[str],
    ) -> Iterator[tuple[int, Exception]]:
        """Start what there is room for; yield what cannot be started."""
        while len(outputs) < self._ahead and (item := next(queue, None)) is not None:
            index, request = item
            if isinstance(request, Exception):
                yield index, request
                continue
            try:
                outputs[index] = self._start(request, stop)
            except ValueError as error:
                yield index, error

    def _start(self, request: Request, stop: Sequence[str]) -> _Output:
        ids, params, context = request
        _check_ranges(params)
        output = _Output(
            request_id=self._next_id,
            prompt_tokens=len(ids),
            min_tokens=params.min_tokens,
            detokenizer=IncrementalDetokenizer(self._table, context=context),
            stops=StopStrings([stop] if isinstance(stop, str) else stop),
        )
        with interrupts_held():
            self._loop.add(output.request_id, ids, params)
            self._alive[output.request_id] = output
            self._next_id += 1
        return output

    def _turn(self) -> int:
        """Launch what can be, wait for a step, and hand out its tokens; returns their number."""
        with interrupts_held():
            while self._loop.advance():
                pass
            return sum(self._take(event) for event in self._loop.collect(None))

    def _take(self, event: Delta | Failed) -> int:
        assert isinstance(event.request_id, int)
        output = self._alive.get(event.request_id)
        if output is None:
            return 0  # it was dropped
        if isinstance(event, Failed):
            output.error = event.error
        else:
            output.take(event)
        if output.ended:
            del self._alive[output.request_id]
            self._loop.cancel(output.request_id)  # a stop string is not the loop's business
        return 0 if isinstance(event, Failed) else len(event.token_ids)

    def _drop(self, outputs: Iterable[_Output]) -> None:
        """Cancel; and if that was all, wait for the steps in flight, so that all pages are free."""
        with interrupts_held():
            for output in outputs:
                self._loop.cancel(output.request_id)
                self._alive.pop(output.request_id, None)
            while not self._alive and self._loop.has_work:
                self._loop.collect(None)


def _check_ranges(params: SamplingParams) -> None:
    for name, (least, most) in _RANGES.items():
        value = getattr(params, name)
        if value is None or least <= value <= most:
            continue
        least_text = "above 0" if least == _LEAST_POSITIVE else f"at least {least}"
        limit = least_text if value < least else f"at most {most:g}"
        raise RequestError(f"{name} is {value}; {limit} is possible", name)
