"""One choice of an answer while it grows: the engine's tokens become text here."""

import math
from dataclasses import dataclass, field
from typing import Literal

from rose.runtime.options import SamplingParams
from rose.serving.client_api import EngineError
from rose.serving.gateway.detokenization import IncrementalDetokenizer, StopStrings, TokenTable
from rose.serving.gateway.sampling_fields import TextRules
from rose.serving.gateway.tokenization import Ids
from rose.serving.protocol import TokenLogprobs, TokensDelta

LEAST_LOGPROB = -9999.0
CONTEXT_TOKENS = 8  # of a prompt, to find text in

Finish = Literal["stop", "length"]


@dataclass(slots=True)
class Piece:
    """What came of a choice since somebody last looked.

    Attributes:
        logprobs: One entry a token, where the request asked for them.
        offsets: For each entry, characters of the text before it, a stop string included.
        finish: With the last piece, why it ended.
    """

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None


class Choice:
    """A choice: what the engine is asked, and its output up to now.

    However the tokens are cut into deltas, text and count are the same. The token that ends the
    output counts, but has no text unless the request wants what ended it. What comes after the
    token that completes a stop string does not count.

    Attributes:
        num_tokens: Tokens of the output.
        cached_tokens: Tokens of the prompt that were found in the prefix cache.
        finish: Why it ended, None so far.
    """

    def __init__(
        self,
        index: int,
        ids: Ids,
        sampling: SamplingParams,
        rules: TextRules,
        table: TokenTable,
    ) -> None:
        self.index = index
        self.ids = ids
        self.sampling = sampling
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish: Finish | None = None
        self._rules = rules
        self._chars = 0
        self._detokenizer = IncrementalDetokenizer(
            table,
            skip_special_tokens=rules.skip_special,
            context=ids[-CONTEXT_TOKENS:].tolist() if rules.goes_on else (),
        )
        self._stops = StopStrings(rules.stops, include=rules.include_stop)

    def take(self, delta: TokensDelta, piece: Piece) -> None:
        """Adds what a delta brings to a piece of this choice.

        Raises:
            EngineError: A number is not finite.
        """
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.prompt_logprobs is not None:
            piece.prompt_logprobs = checked(delta.prompt_logprobs)
        last = len(delta.token_ids) - 1 if delta.finish == "stop" else -1
        for place, token_id in enumerate(delta.token_ids):
            if delta.logprobs is not None:
                piece.logprobs += checked(delta.logprobs[place : place + 1])
                piece.offsets.append(self._chars)
            piece.text += self._text_of(token_id, is_end=place == last)
            if self._stops.matched is not None:
                self.finish = piece.finish = "stop"
                return
        if delta.finish is not None:
            self._end(delta.finish, piece)

    def _text_of(self, token_id: int, is_end: bool) -> str:
        self.num_tokens += 1
        if is_end and not self._rules.include_stop:
            return ""
        text = self._detokenizer.push((token_id,))
        self._chars += len(text)
        # Text of the first tokens passes unsearched.
        return text if self.num_tokens < self._rules.min_tokens else self._stops.push(text)

    def _end(self, finish: Finish, piece: Piece) -> None:
        piece.text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        self.finish = piece.finish = "stop" if self._stops.matched is not None else finish


def checked(entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
    """The same entries, if all their numbers have a form in JSON once they are `floored`.

    Raises:
        EngineError: One is NaN or plus infinity.
    """
    for entry in entries:
        total = entry.logprob + sum(entry.top_logprobs)
        if math.isnan(total) or total == math.inf:
            message = f"The log-probability of token {entry.token_id} is not finite."
            raise EngineError("non_finite", message)
    return entries


def floored(logprob: float) -> float:
    """A log-probability that JSON can hold: what is impossible has -9999."""
    return max(logprob, LEAST_LOGPROB)
