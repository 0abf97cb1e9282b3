"""Chat completions as answers and as events of a stream."""

from collections.abc import Iterable, Sequence

import msgspec

from rose.serving.gateway.answer_head import Head, usage_of
from rose.serving.gateway.ascii_json import encode
from rose.serving.gateway.choice import Piece
from rose.serving.gateway.detokenization import TokenTable
from rose.serving.gateway.generation_input import Plan
from rose.serving.gateway.generation_schemas import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    FinishReason,
)
from rose.serving.gateway.streaming import event
from rose.serving.gateway.token_words import chat_logprobs
from rose.serving.gateway.tool_calls import FoundCall, Parsed, Parser
from rose.serving.gateway.tools import parser_of


class ChatOutput:
    """Turns the pieces of a chat request into what the client gets.

    The chunks of a choice are: one with the role, those with content, one with the finish reason.
    """

    def __init__(self, body: ChatRequest, plan: Plan, head: Head, table: TokenTable) -> None:
        self._logprobs = bool(body.logprobs)
        self._top = body.top_logprobs or 0
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._plan = plan
        self._head = head
        self._table = table
        self._silent = set(range(len(plan.choices)))  # choices of which nothing has been given
        self._single_call = body.parallel_tool_calls is False
        self._num_calls = dict.fromkeys(self._silent, 0)
        self._parsers: dict[int, Parser] = {}
        for index in self._silent:
            if (parser := parser_of(body)) is not None:
                self._parsers[index] = parser

    def chunks(self, pieces: Iterable[Piece]) -> bytes:
        """Events of a stream; empty where there is nothing to tell yet."""
        found: list[bytes] = []
        for piece in pieces:
            found += [self._chunk([choice]) for choice in self._deltas(piece)]
        return b"".join(found)

    def last_chunk(self) -> bytes:
        """The event before `[DONE]`: the usage, if asked for."""
        return self._chunk([], usage=True) if self._usage else b""

    def answer(self, pieces: Sequence[Piece]) -> bytes:
        """The answer as a whole, out of one piece of each choice."""
        answer = ChatAnswer(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=[self._choice(piece) for piece in pieces],
            usage=usage_of(self._plan),
        )
        return encode(answer)

    def _choice(self, piece: Piece) -> ChatChoice:
        parsed = self._parsed(piece)
        calls = [_whole_call(call) for call in parsed.calls]
        return ChatChoice(
            index=piece.index,
            message=AnswerMessage(
                content=None if calls and not parsed.content else parsed.content,
                tool_calls=calls or msgspec.UNSET,
            ),
            logprobs=self._logprobs_of(piece),
            finish_reason=self._finish(piece) or "stop",
        )

    def _deltas(self, piece: Piece) -> list[ChatChunkChoice]:
        found: list[ChatChunkChoice] = []
        if piece.index in self._silent:
            self._silent.discard(piece.index)
            delta = ChatDelta(role="assistant", content="")
            found.append(ChatChunkChoice(index=piece.index, delta=delta))
        logprobs = self._logprobs_of(piece)
        first = self._num_calls[piece.index]
        parsed = self._parsed(piece)
        if parsed.content or (logprobs is not None and logprobs.content):
            delta = ChatDelta(content=parsed.content)
            found.append(ChatChunkChoice(index=piece.index, delta=delta, logprobs=logprobs))
        for number, call in enumerate(parsed.calls, first):
            deltas = _call_deltas(number, call)
            found += [ChatChunkChoice(index=piece.index, delta=delta) for delta in deltas]
        if (reason := self._finish(piece)) is not None:
            last = ChatChunkChoice(index=piece.index, delta=ChatDelta(), finish_reason=reason)
            found.append(last)
        return found

    def _parsed(self, piece: Piece) -> Parsed:
        """What a piece brings, with calls taken out of its text."""
        parser = self._parsers.get(piece.index)
        if parser is None:
            return Parsed(piece.text)
        parsed = parser.push(piece.text)
        if piece.finish is not None:
            rest = parser.finish()
            parsed = Parsed(parsed.content + rest.content, parsed.calls + rest.calls)
        if self._single_call:
            parsed.calls = parsed.calls[: 1 - self._num_calls[piece.index]]
        self._num_calls[piece.index] += len(parsed.calls)
        return parsed

    def _finish(self, piece: Piece) -> FinishReason | None:
        called = piece.finish == "stop" and self._num_calls[piece.index]
        return "tool_calls" if called else piece.finish

    def _logprobs_of(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(self._table, piece.logprobs, self._top) if self._logprobs else None

    def _chunk(self, choices: list[ChatChunkChoice], *, usage: bool = False) -> bytes:
        absent = None if self._usage else msgspec.UNSET
        chunk = ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=choices,
            usage=usage_of(self._plan) if usage else absent,
        )
        return event(encode(chunk))


def _whole_call(call: FoundCall) -> AnswerToolCall:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return AnswerToolCall(id=call.id, type="function", function=function)


def _call_deltas(number: int, call: FoundCall) -> list[ChatDelta]:
    """A call as it comes in a stream: who is called, then with what."""
    start = CalledFunction(name=call.name)
    parts = [
        AnswerToolCall(index=number, id=call.id, type="function", function=start),
        AnswerToolCall(index=number, function=CalledFunction(arguments=call.arguments)),
    ]
    return [ChatDelta(tool_calls=[part]) for part in parts]
