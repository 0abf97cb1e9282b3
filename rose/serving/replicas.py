"""Several engines of one model behind the interface of one: splitting and balancing.

A large batch is cut into chunks. Each goes to the replica with the fewest outstanding tokens at
that moment, and only a few of a request's chunks are out at one time: so replicas share the work as
they get through it, and small requests pass between the chunks of large ones. A request that a
dying replica has not begun to answer is sent to another.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rose.models.card import ModelCard, RowOutput
from rose.runtime.options import EmbedOptions, Priority, SamplingParams
from rose.serving.client import EngineClient
from rose.serving.client_api import EmbedAnswer, EngineError, ScoreAnswer, within
from rose.serving.protocol import Stats, TokensDelta
from rose.serving.stats import total

log = logging.getLogger(__name__)

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", EmbedAnswer, ScoreAnswer)
RowT = TypeVar("RowT", bound=np.generic)
Ids = npt.NDArray[np.int32]

CHUNK_TOKENS = 4096
CHUNKS_OUT_PER_REPLICA = 2
MAX_FAULTS = 3  # in a row, and the other replicas go first
AVOIDED_S = 5.0


class Replica:
    """An engine, the tokens that it has been sent and not answered, and its faults in a row."""

    def __init__(self, client: EngineClient) -> None:
        """Start with nothing outstanding."""
        self.client = client
        self.outstanding = 0
        self._faults = 0
        self._last_fault = 0.0
        self._strange = ""  # the other checkpoint that it was last seen with

    def serves(self, card: ModelCard | None) -> bool:
        """Whether it is ready, and with the checkpoint of `card`; another one is logged once."""
        own = self.client.card
        if not self.client.ready or own is None or card is None:
            return False
        if own.fingerprint != card.fingerprint and own.fingerprint != self._strange:
            self._strange = own.fingerprint
            log.warning("a replica of %s serves another checkpoint: it is not used", card.name)
        return own.fingerprint == card.fingerprint

    @property
    def avoided(self) -> bool:
        """Whether it fails whatever it gets."""
        return self._faults >= MAX_FAULTS and time.monotonic() - self._last_fault < AVOIDED_S

    def note(self, error: BaseException | None) -> None:
        """Count faults."""
        if error is None:
            self._faults = 0
        elif isinstance(error, EngineError) and error.kind == "internal":
            self._faults += 1
            self._last_fault = time.monotonic()


class Busy:
    """Counts tokens as outstanding at a replica while the block runs, and notes how it ends."""

    __slots__ = ("_replica", "_tokens")

    def __init__(self, replica: Replica, tokens: int) -> None:
        """Use `replica`."""
        self._replica, self._tokens = replica, tokens

    def __enter__(self) -> EngineClient:
        self._replica.outstanding += self._tokens
        return self._replica.client

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._replica.outstanding -= self._tokens
        self._replica.note(error)


class ReplicaSet:
    """The engines of one model, used like one engine."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        """Balance over `clients`, at least one."""
        assert clients
        self._replicas = [Replica(client) for client in clients]

    def add(self, client: EngineClient) -> None:
        """Balance over one more engine."""
        self._replicas.append(Replica(client))

    # What they are

    @property
    def card(self) -> ModelCard | None:
        """The card of the first replica that is ready; if none is, of the first that ever was."""
        return self._leader.client.card

    @property
    def tokenizer_json(self) -> bytes:
        """The tokenizer that belongs to `card`."""
        return self._leader.client.tokenizer_json

    @property
    def ready(self) -> bool:
        """Whether any replica takes work."""
        return self._leader.client.ready

    @property
    def unready_reason(self) -> str | None:
        """Why none takes work, None when one does."""
        if self.ready:
            return None
        reasons = [replica.client.unready_reason or "" for replica in self._replicas]
        return "; ".join(dict.fromkeys(reasons))

    @property
    def stats(self) -> Stats:
        """The sum of the replicas' numbers."""
        return total(replica.client.stats for replica in self._replicas)

    # What they do

    async def embed(
        self,
        ids: Sequence[Ids],
        options: EmbedOptions,
        *,
        pool_from: int = 0,
        spans: Sequence[Ids] | None = None,
        outputs: tuple[RowOutput, ...] = ("text",),
        queries: bool = False,
        priority: Priority = "online",
        timeout_s: float | None = None,
        trace: str = "",
    ) -> EmbedAnswer:
        """Embed texts, cut into chunks over the replicas; see `EngineClient.embed`.

        All chunks are of one checkpoint, also when a replica comes back with another one meanwhile.
        """

        async def on(client: EngineClient, chunk: slice) -> EmbedAnswer:
            return await client.embed(
                ids[chunk],
                options,
                pool_from=pool_from,
                spans=None if spans is None else spans[chunk],
                outputs=outputs,
                queries=queries,
                priority=priority,
                trace=trace,
            )

        answers = await self._in_chunks(on, ids, timeout_s)
        if len(answers) == 1:
            return answers[0]
        vectors = _rows([a.vectors for a in answers])
        more = [_rows(list(parts)) for parts in zip(*(a.more for a in answers), strict=True)]
        return EmbedAnswer(vectors, *_times(answers), tuple(more))

    async def score(
        self,
        ids: Sequence[Ids],
        segments: Sequence[Ids] | None = None,
        *,
        priority: Priority = "online",
        timeout_s: float | None = None,
        trace: str = "",
    ) -> ScoreAnswer:
        """Score texts or pairs, cut into chunks as in `embed`; see `EngineClient.score`."""

        async def on(client: EngineClient, chunk: slice) -> ScoreAnswer:
            parts = None if segments is None else segments[chunk]
            return await client.score(ids[chunk], parts, priority=priority, trace=trace)

        answers = await self._in_chunks(on, ids, timeout_s)
        return ScoreAnswer(_rows([a.scores for a in answers]), *_times(answers))

    async def _in_chunks(
        self,
        ask: Callable[[EngineClient, slice], Awaitable[AnswerT]],
        ids: Sequence[Ids],
        timeout_s: float | None,
    ) -> list[AnswerT]:
        """Ask for a batch of texts chunk by chunk, within a time."""
        card, lengths = self.card, [len(text) for text in ids]

        async def run(chunk: range) -> AnswerT:
            part = slice(chunk.start, chunk.stop)
            tokens = sum(lengths[part])
            return await self._on_some_replica(lambda client: ask(client, part), tokens, card)

        return await within(timeout_s, self._run_chunks(cut(lengths), run))

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
        card = self.card
        tried: list[Replica] = []
        while True:
            replica = self._choose(card, tried)
            begun = False
            try:
                with Busy(replica, tokens) as client:
                    stream = client.generate(ids, sampling, priority=priority, trace=trace)
                    async with aclosing(stream):
                        async for delta in stream:
                            begun = True
                            yield delta
                return
            except EngineError as error:
                tried.append(replica)
                if begun or not self._can_move(error, card, tried):
                    raise

    async def _run_chunks(
        self, chunks: list[range], run: Callable[[range], Awaitable[AnswerT]]
    ) -> list[AnswerT]:
        """Run chunks, a few at a time; the first error cancels the others and is raised."""
        if len(chunks) == 1:
            return [await run(chunks[0])]
        places = asyncio.Semaphore(CHUNKS_OUT_PER_REPLICA * len(self._replicas))

        async def run_one(chunk: range) -> AnswerT:
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
        self,
        work: Callable[[EngineClient], Awaitable[T]],
        tokens: int,
        card: ModelCard | None,
    ) -> T:
        tried: list[Replica] = []
        while True:
            replica = self._choose(card, tried)
            try:
                with Busy(replica, tokens) as client:
                    return await work(client)
            except EngineError as error:
                tried.append(replica)
                if not self._can_move(error, card, tried):
                    raise

    def _can_move(
        self, error: EngineError, card: ModelCard | None, tried: Sequence[Replica]
    ) -> bool:
        """Whether another replica may still serve what one would not."""
        if error.kind not in ("unavailable", "overloaded"):
            return False
        return any(replica not in tried for replica in self._usable(card))

    def _choose(self, card: ModelCard | None, tried: Sequence[Replica]) -> Replica:
        """Return the replica with the fewest outstanding tokens of those not tried yet."""
        usable = [replica for replica in self._usable(card) if replica not in tried]
        if not usable:
            reason = self.unready_reason or "its replicas have changed"
            raise EngineError("unavailable", f"the engine is not ready: {reason}")
        return min(usable, key=lambda replica: (replica.avoided, replica.outstanding))

    @property
    def _leader(self) -> Replica:
        for replica in self._replicas:
            if replica.client.ready:
                return replica
        known = [replica for replica in self._replicas if replica.client.card is not None]
        return next(iter([*known, *self._replicas]))

    def _usable(self, card: ModelCard | None) -> list[Replica]:
        """Return the replicas that are ready and serve the checkpoint of `card`."""
        return [replica for replica in self._replicas if replica.serves(card)]


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


def _rows(parts: list[npt.NDArray[RowT]]) -> npt.NDArray[RowT]:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _times(answers: Sequence[EmbedAnswer | ScoreAnswer]) -> tuple[float, float]:
    """Seconds in the queue and of computing, of a request in chunks."""
    queued_s = answers[0].queued_s
    return queued_s, max(a.queued_s + a.computed_s for a in answers) - queued_s


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
