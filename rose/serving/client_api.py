"""The seam between the gateway and an engine: what a client of one offers. Free of torch."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rose.models.card import ModelCard, RowOutput
from rose.runtime.options import EmbedOptions, Priority, SamplingParams
from rose.serving.protocol import FailureKind, Stats, TokensDelta

T = TypeVar("T")


class EngineError(Exception):
    """A request failed at the engine, or never reached it.

    Attributes:
        kind: Whose fault it is; see `rose.serving.protocol.FailureKind`.
        message: For the user.
        field: The request field at fault, such as "dimensions" or "input[3]", if one is.
    """

    def __init__(self, kind: FailureKind, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field = field


async def within(timeout_s: float | None, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work on a request, for so many seconds at most; None: however long it takes.

    Raises:
        EngineError: It took longer.
    """
    if timeout_s is None:
        return await work
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise EngineError("deadline", f"no answer within {timeout_s} seconds") from None


@dataclass(frozen=True, slots=True)
class EmbedAnswer:
    """The vectors of one request.

    Attributes:
        vectors: Rows of the first output that was asked for: [texts, width] of the output dtype
            (for "binary" and "ubinary" width is in bytes), or [tokens, width].
        queued_s: Seconds from arrival at the engine to the first step.
        computed_s: Seconds from the first step to the answer.
        more: Rows of the other outputs.
    """

    vectors: npt.NDArray[np.generic]
    queued_s: float
    computed_s: float
    more: tuple[npt.NDArray[np.generic], ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """The raw scores of one request.

    Attributes:
        scores: float32 [texts, labels], before any activation.
        queued_s: Seconds from arrival at the engine to the first step.
        computed_s: Seconds from the first step to the answer.
    """

    scores: npt.NDArray[np.float32]
    queued_s: float
    computed_s: float


class EngineClient(Protocol):
    """A connection to the engine (or the replicas) of one model, used from one event loop."""

    @property
    def card(self) -> ModelCard | None:
        """The model; None until the first handshake."""

    @property
    def tokenizer_json(self) -> bytes:
        """The model's tokenizer.json; meaningful once there is a card."""

    @property
    def ready(self) -> bool:
        """Whether the engine answered a round trip lately and takes work."""

    @property
    def unready_reason(self) -> str | None:
        """Why it is not ready, for people; None when it is."""

    @property
    def stats(self) -> Stats:
        """The engine's numbers as it last gave them."""

    async def embed(
        self,
        ids: Sequence[npt.NDArray[np.int32]],
        options: EmbedOptions,
        *,
        pool_from: int = 0,
        spans: Sequence[npt.NDArray[np.int32]] | None = None,
        outputs: tuple[RowOutput, ...] = ("text",),
        queries: bool = False,
        priority: Priority = "online",
        timeout_s: float | None = None,
        trace: str = "",
    ) -> EmbedAnswer:
        """Embeds texts given as token ids; one row per text, in order.

        With `spans`, int32 [n, 2] for each text, one row per span: first token, and the one after
        its last. `outputs` are computed in one pass; those but "text" have one row per token,
        float32, whatever the options. `queries` says that the texts are queries, to a
        late-interaction model.

        Cancelling the awaiting task cancels the request at the engine.

        Raises:
            EngineError: The request failed.
        """
        ...

    async def score(
        self,
        ids: Sequence[npt.NDArray[np.int32]],
        segments: Sequence[npt.NDArray[np.int32]] | None = None,
        *,
        priority: Priority = "online",
        timeout_s: float | None = None,
        trace: str = "",
    ) -> ScoreAnswer:
        """Scores texts, or joined pairs of texts, given as token ids; one row per text, in order.

        `segments` say which token is of which text of a pair, for models that want to know.
        Cancelling the awaiting task cancels the request at the engine.

        Raises:
            EngineError: The request failed.
        """
        ...

    def generate(
        self,
        ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        *,
        priority: Priority = "online",
        trace: str = "",
    ) -> AsyncGenerator[TokensDelta, None]:
        """Continues a prompt given as token ids, int32 [tokens].

        Yields what each step brings; the last delta has `finish`. Closing the generator, or
        cancelling the task that iterates, cancels the request at the engine: use `aclosing`.
        A reader that stops reading does not hold the engine up.

        Raises:
            EngineError: The request failed; also in the middle of the output.
        """
        ...
