"""Runs the choices of a request at an engine, and gathers what comes of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from rose.runtime.options import Priority
from rose.serving.client_api import EngineClient, EngineError
from rose.serving.gateway.choice import Choice, Piece
from rose.serving.gateway.generation_metrics import GenerationMetrics


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tokens of a request come from, and what it counts for.

    Attributes:
        model: Name in the metrics.
        arrived: When the request did, on the clock of `time.perf_counter`.
    """

    client: EngineClient
    model: str
    metrics: GenerationMetrics
    arrived: float
    priority: Priority
    trace: str


class Pieces:
    """What came of the choices and was not taken yet; at most one piece of each choice.

    A reader that is slow finds more text in a piece, and holds nobody up.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Piece] = {}
        self._wake = asyncio.Event()
        self._done = asyncio.Event()
        self._error: BaseException | None = None
        self._open = 0

    def watch(self, task: asyncio.Task[None]) -> None:
        """Counts on a task to add pieces until it is done."""
        self._open += 1
        task.add_done_callback(self._closed)

    def of(self, index: int) -> Piece:
        """The piece of a choice to add to. What is added without awaiting is taken together."""
        self._wake.set()
        piece = self._waiting.get(index)
        if piece is None:
            piece = self._waiting[index] = Piece(index)
        return piece

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        """Gives all pieces there are, again and again until all choices have ended.

        Raises:
            EngineError: A choice failed; what came before has been given.
        """
        while True:
            if self._waiting:
                pieces, self._waiting = list(self._waiting.values()), {}
                yield pieces
            elif self._error is not None:
                raise self._error
            elif not self._open:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def all(self) -> list[Piece]:
        """Waits for the end, and gives one piece of each choice.

        Raises:
            EngineError: A choice failed.
        """
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return [self._waiting[index] for index in sorted(self._waiting)]

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._open -= 1
        if not task.cancelled() and self._error is None:
            self._error = task.exception()
        if self._error is not None or not self._open:
            self._done.set()
        self._wake.set()


@asynccontextmanager
async def running(choices: Sequence[Choice], source: Source) -> AsyncIterator[Pieces]:
    """Runs choices; those that are not done when the block is left are cancelled."""
    pieces = Pieces()
    tasks = [asyncio.create_task(_follow(choice, source, pieces)) for choice in choices]
    for task in tasks:
        pieces.watch(task)
    try:
        yield pieces
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(choice: Choice, source: Source, pieces: Pieces) -> None:
    started = 0.0
    deltas = source.client.generate(
        choice.ids, choice.sampling, priority=source.priority, trace=source.trace
    )
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                if not started and delta.token_ids:
                    started = time.perf_counter()
                choice.take(delta, pieces.of(choice.index))
                if choice.finish is not None:
                    return
        raise EngineError("internal", "The engine's output has no end.")
    finally:
        source.metrics.count(source.model, choice.num_tokens, source.arrived, started)
