"""Completions as answers and as events of a stream."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rose.serving.gateway.answer_head import Head, usage_of
from rose.serving.gateway.ascii_json import encode
from rose.serving.gateway.choice import Piece, floored
from rose.serving.gateway.detokenization import IncrementalDetokenizer, TokenTable
from rose.serving.gateway.generation_input import Plan, Prompt
from rose.serving.gateway.generation_schemas import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from rose.serving.gateway.streaming import event
from rose.serving.gateway.token_words import likely, word
from rose.serving.protocol import TokenLogprobs


class CompletionOutput:
    """Turns the pieces of a completion request into what the client gets.

    With `echo` a choice starts with its prompt: as the request has it, or all of its ids as text,
    special tokens too.
    """

    def __init__(self, body: CompletionRequest, plan: Plan, head: Head, table: TokenTable) -> None:
        """Prepares the output. CPU work: call it off the event loop."""
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs is not None
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._plan = plan
        self._head = head
        self._table = table
        self._echoes: list[_Echo] = []
        if self._echo:
            self._echoes = [echo_of(prompt, table) for prompt in plan.prompts]
        self._open = set(range(len(plan.choices)))  # choices of which nothing has been given

    def chunks(self, pieces: Iterable[Piece]) -> bytes:
        """Events of a stream; empty where there is nothing to tell yet."""
        found: list[bytes] = []
        for piece in pieces:
            choice = self._choice(piece)
            if choice.text or choice.logprobs or choice.finish_reason:
                found.append(event(encode(self._answer([choice], usage=False))))
        return b"".join(found)

    def last_chunk(self) -> bytes:
        """The event before `[DONE]`: the usage, if asked for."""
        return event(encode(self._answer([], usage=True))) if self._usage else b""

    def answer(self, pieces: Sequence[Piece]) -> bytes:
        """The answer as a whole, out of one piece of each choice."""
        choices = [self._choice(piece) for piece in pieces]
        return encode(self._answer(choices, usage=True))

    def _answer(self, choices: list[CompletionChoice], *, usage: bool) -> CompletionAnswer:
        absent = None if self._usage else msgspec.UNSET
        return CompletionAnswer(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=choices,
            usage=usage_of(self._plan) if usage else absent,
        )

    def _choice(self, piece: Piece) -> CompletionChoice:
        echo = self._echoes[piece.index // self._plan.n] if self._echo else _NO_ECHO
        text, logprobs = piece.text, None
        is_first = piece.index in self._open
        self._open.discard(piece.index)
        if self._logprobs:
            logprobs = empty_logprobs()
            if is_first and self._echo:
                self._add_prompt(logprobs, echo, piece.prompt_logprobs or [])
            for entry, offset in zip(piece.logprobs, piece.offsets, strict=True):
                self._add(logprobs, entry, len(echo.text) + offset)
            logprobs = logprobs if logprobs.tokens else None
        if is_first:
            text = echo.text + text
        reason = piece.finish
        return CompletionChoice(
            index=piece.index, text=text, logprobs=logprobs, finish_reason=reason
        )

    def _add_prompt(
        self, logprobs: CompletionLogprobs, echo: "_Echo", entries: list[TokenLogprobs]
    ) -> None:
        logprobs.tokens.append(word(self._table, echo.first_id))
        logprobs.token_logprobs.append(None)
        logprobs.top_logprobs.append(None)
        logprobs.text_offset.append(0)
        for entry, offset in zip(entries, echo.offsets[1:], strict=True):
            self._add(logprobs, entry, offset)

    def _add(self, logprobs: CompletionLogprobs, entry: TokenLogprobs, offset: int) -> None:
        logprobs.tokens.append(word(self._table, entry.token_id))
        logprobs.token_logprobs.append(floored(entry.logprob))
        logprobs.top_logprobs.append(likely(self._table, entry))
        logprobs.text_offset.append(offset)


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt as `echo` gives it back.

    Attributes:
        offsets: Characters before each token.
    """

    text: str = ""
    first_id: int = 0
    offsets: list[int] = field(default_factory=list)


_NO_ECHO = _Echo()


def echo_of(prompt: Prompt, table: TokenTable) -> _Echo:
    """A prompt as text. Offsets are exact where decoding gives the text back as it was."""
    detokenizer = IncrementalDetokenizer(table, skip_special_tokens=False)
    offsets: list[int] = []
    text = ""
    ids = prompt.ids.tolist()
    for place, token_id in enumerate(ids):
        offsets.append(len(text))
        if place >= prompt.added:
            text += detokenizer.push((token_id,))
    text += detokenizer.finish()
    if prompt.text is not None:
        text = prompt.text
        offsets = [min(offset, len(text)) for offset in offsets]
    return _Echo(text, ids[0], offsets)


def empty_logprobs() -> CompletionLogprobs:
    """Log-probabilities of no token."""
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
