"""Several engines of one model behind the interface of one: splitting and balancing.

A large batch is cut into chunks. Each goes to the replica with the fewest outstanding tokens at
that moment, and only a few of a request's chunks are out at one time: so replicas share the work as
they get through it, and small requests pass between the chunks of large ones. A request that a
dying replica has not begun to answer is sent to another.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rose.models.card import ModelCard
from rose.runtime.options import EmbedOptions, Priority, SamplingParams
from rose.serving.client import EngineClient
from rose.serving.client_api import EmbedAnswer, EngineError
from rose.serving.protocol import Stats, TokensDelta

log = logging.getLogger(__name__)

T = TypeVar("T")
Ids = npt.NDArray[np.int32]

CHUNK_TOKENS = 4096
CHUNKS_OUT_PER_REPLICA = 2


class Replica:
    """An engine, and the tokens that it has been sent and not answered."""

    def __init__(self, client: EngineClient) -> None:
        """Start with nothing outstanding."""
        self.client = client
        self.outstanding = 0

    @contextmanager
    def busy_with(self, tokens: int) -> Iterator[EngineClient]:
        """Count tokens as outstanding for a while."""
        self.outstanding += tokens
        try:
            yield self.client
        finally:
            self.outstanding -= tokens


class ReplicaSet:
    """The engines of one model, used like one engine."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        """Balance over `clients`, at least one."""
        assert clients
        self._replicas = [Replica(client) for client in clients]

    # What they are

    @property
    def card(self) -> ModelCard | None:
        """The card of the first replica that has answered."""
        return next((card for r in self._replicas if (card := r.client.card) is not None), None)

    @property
    def tokenizer_json(self) -> bytes:
        """The tokenizer that belongs to `card`."""
        return next((r.client.tokenizer_json for r in self._replicas if r.client.card), b"")

    @property
    def ready(self) -> bool:
        """Whether any replica takes work."""
        return bool(self._usable())

    @property
    def unready_reason(self) -> str | None:
        """Why none takes work, None when one does."""
        if self.ready:
            return None
        reasons = [self._why_not(replica) for replica in self._replicas]
        return "; ".join(dict.fromkeys(reasons))

    @property
    def missing(self) -> list[str]:
        """A line for each replica that does not take work."""
        usable = self._usable()
        return [
            f"replica {i}: {self._why_not(replica)}"
            for i, replica in enumerate(self._replicas)
            if replica not in usable
        ]

    @property
    def stats(self) -> Stats:
        """The sum of the replicas' numbers."""
        numbers = [msgspec.structs.asdict(r.client.stats) for r in self._replicas]
        return Stats(**{name: sum(n[name] for n in numbers) for name in numbers[0]})

    # What they do

    async def embed(
        self,
        ids: Sequence[Ids],
        options: EmbedOptions,
        *,
        pool_from: int = 0,
        priority: Priority = "online",
        timeout_s: float | None = None,
        trace: str = "",
    ) -> EmbedAnswer:
        """Embed texts, cut into chunks over the replicas; see `EngineClient.embed`."""

        async def run(chunk: range) -> EmbedAnswer:
            texts = ids[chunk.start : chunk.stop]
            tokens = sum(len(text) for text in texts)

            async def on(client: EngineClient) -> EmbedAnswer:
                return await client.embed(
                    texts, options, pool_from=pool_from, priority=priority, trace=trace
                )

            return await self._on_some_replica(on, tokens)

        try:
            async with asyncio.timeout(timeout_s):
                answers = await self._run_chunks(cut([len(text) for text in ids]), run)
        except TimeoutError:
            raise EngineError("deadline", f"no answer within {timeout_s} seconds") from None
        return EmbedAnswer(
            np.concatenate([a.vectors for a in answers])
            if len(answers) > 1
            else answers[0].vectors,
            queued_s=answers[0].queued_s,
            computed_s=max(a.queued_s + a.computed_s for a in answers) - answers[0].queued_s,
        )

    async def generate(
        self,
        ids: Ids,
        sampling: SamplingParams,
        *,
        priority: Priority = "online",
        trace: str = "",
    ) -> AsyncGenerator[TokensDelta, None]:
        """Continue a prompt on one replica; see `EngineClient.generate`.

        It starts again on another one if its replica is lost before the first token.
        """
        tokens = len(ids) + (sampling.max_tokens or 0)
        lost: set[Replica] = set()
        while True:
            replica = self._choose(lost)
            begun = False
            try:
                with replica.busy_with(tokens) as client:
                    stream = client.generate(ids, sampling, priority=priority, trace=trace)
                    async with aclosing(stream):
                        async for delta in stream:
                            begun = True
                            yield delta
                return
            except EngineError as error:
                if begun or error.kind != "unavailable":
                    raise
                lost.add(replica)

    async def _run_chunks(
        self, chunks: list[range], run: Callable[[range], Awaitable[EmbedAnswer]]
    ) -> list[EmbedAnswer]:
        """Run chunks, a few at a time; the first error cancels the others and is raised."""
        if len(chunks) == 1:
            return [await run(chunks[0])]
        places = asyncio.Semaphore(CHUNKS_OUT_PER_REPLICA * len(self._replicas))

        async def run_one(chunk: range) -> EmbedAnswer:
            async with places:
                try:
                    return await run(chunk)
                except EngineError as error:
                    raise _shifted(error, chunk.start) from None

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run_one(chunk)) for chunk in chunks]
        except* EngineError as errors:
            raise _first(errors) from None
        return [task.result() for task in tasks]

    async def _on_some_replica(
        self, work: Callable[[EngineClient], Awaitable[T]], tokens: int
    ) -> T:
        lost: set[Replica] = set()
        while True:
            replica = self._choose(lost)
            try:
                with replica.busy_with(tokens) as client:
                    return await work(client)
            except EngineError as error:
                if error.kind != "unavailable":
                    raise
                lost.add(replica)
                if len(lost) == len(self._replicas):
                    raise
                log.info("trying another replica: %s", error)

    def _choose(self, lost: set[Replica]) -> Replica:
        """Return the replica with the fewest outstanding tokens."""
        usable = [replica for replica in self._usable() if replica not in lost]
        if not usable:
            reason = self.unready_reason or "its replicas were lost"
            raise EngineError("unavailable", f"the engine is not ready: {reason}")
        return min(usable, key=lambda replica: replica.outstanding)

    def _usable(self) -> list[Replica]:
        """Return the replicas that are ready and serve the same as the first that answered."""
        card = self.card
        return [
            replica
            for replica in self._replicas
            if replica.client.ready and card and _same(replica.client.card, card)
        ]

    def _why_not(self, replica: Replica) -> str:
        return replica.client.unready_reason or "it serves another checkpoint than the others"


def cut(lengths: Sequence[int], chunk_tokens: int = CHUNK_TOKENS) -> list[range]:
    """Cut a batch of texts, given by their tokens, into chunks of about `chunk_tokens`.

    A text above that is a chunk of its own.
    """
    chunks: list[range] = []
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > chunk_tokens:
            chunks.append(range(start, index))
            start, tokens = index, 0
        tokens += length
    return [*chunks, range(start, len(lengths))]


def _same(card: ModelCard | None, other: ModelCard) -> bool:
    return card is not None and card.fingerprint == other.fingerprint


def _shifted(error: EngineError, by: int) -> EngineError:
    """Make `input[i]` count from the start of the request and not of the chunk."""
    if error.field is None or not error.field.startswith("input["):
        return error
    place = int(error.field.removeprefix("input[").partition("]")[0])
    return EngineError(error.kind, error.message, f"input[{place + by}]")


def _first(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    """Return the first error of a group of groups."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, EngineError)
    return found
