"""From a planned generation to its HTTP answer, whole or as a stream."""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from rose.serving.client_api import EngineError
from rose.serving.gateway.choice import Piece
from rose.serving.gateway.generation import Source, running
from rose.serving.gateway.generation_input import Plan
from rose.serving.gateway.generation_schemas import ChatRequest, CompletionRequest
from rose.serving.gateway.models import ServedModel
from rose.serving.gateway.operation import Call
from rose.serving.gateway.streaming import EventStream

# Fewer log-probabilities than this are written out at once: a thread would cost more than it saves.
ENCODE_IN_THREAD_ENTRIES = 256
ENCODE_IN_THREAD_CHARS = 1 << 20

T = TypeVar("T")


class Output(Protocol):
    """How a route writes what its choices bring."""

    def chunks(self, pieces: Iterable[Piece]) -> bytes:
        """Events of a stream; empty where there is nothing to tell yet."""
        ...

    def last_chunk(self) -> bytes:
        """The event before `[DONE]`, or nothing."""
        ...

    def answer(self, pieces: Sequence[Piece]) -> bytes:
        """The answer as a whole, out of one piece of each choice."""
        ...


async def respond(
    call: Call[ChatRequest] | Call[CompletionRequest],
    model: ServedModel,
    plan: Plan,
    output: Output,
) -> Response:
    """Generates what was planned."""
    body, metrics = call.body, call.gateway.metrics
    metrics.tokens.labels(model.name).inc(sum(len(prompt.ids) for prompt in plan.prompts))
    metrics.batch_size.labels(model.name).observe(len(plan.prompts))
    source = Source(
        client=model.client,
        model=model.name,
        metrics=metrics.generation,
        arrived=call.exchange.started,
        priority=body.priority or "online",
        trace=call.exchange.request_id,
    )
    if body.stream:
        return EventStream(
            call.gateway, lambda: _events(call, plan, output, source), call.time_left_s
        )
    with _blaming(plan.blamed):
        async with running(plan.choices, source) as pieces:
            found = await pieces.all()
            content = await _written(call, output.answer, found)
    return Response(content, media_type="application/json")


async def _events(
    call: Call[Any], plan: Plan, output: Output, source: Source
) -> AsyncGenerator[bytes, None]:
    with _blaming(plan.blamed):
        async with running(plan.choices, source) as pieces:
            async for batch in pieces:
                if found := await _written(call, output.chunks, batch):
                    yield found
    if last := output.last_chunk():
        yield last


@contextmanager
def _blaming(fields: Mapping[str, str]) -> Iterator[None]:
    """Lets the engine's errors name fields as the request does."""
    try:
        yield
    except EngineError as error:
        name = fields.get(error.field or "")
        if name is None:
            raise
        raise EngineError(error.kind, error.message, name) from error


async def _written(
    call: Call[Any], write: Callable[[Sequence[Piece]], bytes], pieces: Sequence[Piece]
) -> bytes:
    """Writes at once what is soon done, and the rest off the event loop."""
    entries = sum(len(piece.logprobs) + len(piece.prompt_logprobs or ()) for piece in pieces)
    chars = sum(len(piece.text) for piece in pieces)
    if entries < ENCODE_IN_THREAD_ENTRIES and chars < ENCODE_IN_THREAD_CHARS:
        return write(pieces)
    return await call.in_thread(write, pieces)
