"""Ranking by vectors: the cosine of those of texts, or the best matches of those of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.models.card import EmbeddingCard, LateInteraction, Side
from rose.serving.client_api import EngineError
from rose.serving.gateway.errors import ApiError, bad_request, from_engine
from rose.serving.gateway.models import ServedModel
from rose.serving.gateway.operation import Call
from rose.serving.gateway.ranking_schemas import PairRequest
from rose.serving.gateway.routes.embeddings import MAX_NUMBERS_PER_TOKEN, Embedded, embed
from rose.serving.gateway.schemas import EmbeddingRequest, Usage
from rose.serving.gateway.token_vectors import maxsim
from rose.serving.gateway.truncation import limit_of

Places = Mapping[str, str]  # texts by their places in the request
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """The scores of a request.

    Attributes:
        model: Name to report.
        raw: float64 [pairs], which the order goes by.
        scores: float64 [pairs], as the request wants them.
        usage: Token counts to report.
    """

    model: str
    raw: Floats
    scores: Floats
    usage: Usage

    def order(self) -> list[int]:
        """Places of the pairs from the best score on; equal ones as they came."""
        found: list[int] = np.argsort(-self.raw, kind="stable").tolist()
        return found


def usage_of(tokens: int, truncated: int) -> Usage:
    """Token counts to report."""
    return Usage(prompt_tokens=tokens, total_tokens=tokens, truncated_tokens=truncated)


async def score_vectors(
    call: Call[Any], body: PairRequest, model: ServedModel, queries: Places, documents: Places
) -> Scored:
    """Scores pairs by an embedder's vectors; see `rose.serving.gateway.routes.ranking`.

    Raises:
        ApiError: 400, a field does not go with that.
        EngineError: The engine failed.
    """
    card = model.card.embedding
    assert card is not None
    _check_fields(body, model.name, card)
    embedder = _Embedder(call, body, model, card)
    if card.late is None:
        scores = await _cosines(embedder, queries, documents)
    else:
        scores = await _matches(embedder, card.late, queries, documents)
    return Scored(model.name, scores, scores, usage_of(embedder.tokens, embedder.truncated))


def _check_fields(body: PairRequest, model: str, card: EmbeddingCard) -> None:
    unfit = {
        "instruction": bool(body.instruction),
        "truncation_strategy": body.truncation_strategy == "only_second",
        "max_chunks_per_doc": body.max_chunks_per_doc not in (None, 1),
    }
    how = "cosine" if card.late is None else "vectors of tokens"
    for name, is_unfit in unfit.items():
        if is_unfit:
            message = f"'{name}' does not go with '{model}', which ranks by {how}."
            raise bad_request(message, name)


@dataclass
class _Embedder:
    """Embeds the texts of a request to rank, and counts their tokens."""

    call: Call[Any]
    body: PairRequest
    model: ServedModel
    card: EmbeddingCard
    tokens: int = 0
    truncated: int = 0

    async def embed(self, texts: Places, side: Side) -> Embedded:
        """The vectors of queries or documents; errors name the texts as the request does."""
        most = self.body.max_tokens_per_doc if side == "document" else None
        request = self._request(texts, side, most)
        try:
            done = await self._run(request)
        except EngineError as error:
            raise renamed(from_engine(error), list(texts)) from error
        except ApiError as error:
            if most is not None and error.param == "truncate_prompt_tokens":
                raise error.renamed("max_tokens_per_doc") from None
            raise renamed(error, list(texts)) from None
        self.tokens += done.tokens
        self.truncated += done.work.truncated
        return done

    async def _run(self, request: EmbeddingRequest) -> Embedded:
        if self.card.late is None:
            return await embed(self.call, request)
        return await embed(self.call, request, outputs=("multi_vector",), tasks=("score",))

    def _request(self, texts: Places, side: Side, most: int | None) -> EmbeddingRequest:
        """What is asked of the embedder; `most` are the tokens that a document is cut to."""
        body, is_late = self.body, self.card.late is not None
        prompt, name = (body.prompt, body.prompt_name) if side == "query" else (None, None)
        has_prompt = prompt is not None or name is not None
        request = EmbeddingRequest(
            model=self.model.name,
            input=list(texts.values()),
            normalize=None if is_late else True,
            prompt=prompt,
            prompt_name=name,
            input_type=None if has_prompt and not is_late else side,
            truncate=body.truncate,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side,
            priority=body.priority,
        )
        if most is not None:
            limit = limit_of(body, self.model.card, self.call.gateway.settings)
            request.truncate = None
            request.truncate_prompt_tokens = min(most, limit.tokens)
        return request


async def _matches(
    embedder: _Embedder, late: LateInteraction, queries: Places, documents: Places
) -> Floats:
    """Scores pairs by vectors of tokens, of few enough texts at a time to hold them.

    One query for all documents is held throughout; others go with their documents.
    """
    common = await embedder.embed(queries, "query") if len(queries) == 1 else None
    longest = late.document_length + (0 if common else late.query_length)
    size = max(1, MAX_NUMBERS_PER_TOKEN // (embedder.card.dimensions * longest))
    scores = []
    for at in range(0, len(documents), size):
        asked = common or await embedder.embed(_part(queries, at, size), "query")
        found = await embedder.embed(_part(documents, at, size), "document")
        scores.append(await embedder.call.in_thread(_maxsim, asked, found, mean=late.mean))
    return np.concatenate(scores)


def _part(texts: Places, at: int, size: int) -> Places:
    """At most `size` texts from the one at `at` on."""
    return dict(islice(texts.items(), at, at + size))


def _maxsim(asked: Embedded, found: Embedded, *, mean: bool) -> Floats:
    return maxsim(asked.token_vectors(), found.token_vectors(), mean=mean)


async def _cosines(embedder: _Embedder, queries: Places, documents: Places) -> Floats:
    """Scores pairs by the cosine of their vectors, with the embedder's prompts for both."""
    asked = await embedder.embed(queries, "query")
    found = await embedder.embed(documents, "document")
    return await embedder.call.in_thread(_products, asked.answer.vectors, found.answer.vectors)


def _products(asked: npt.NDArray[Any], found: npt.NDArray[Any]) -> Floats:
    """The cosines of unit vectors: queries [N, D], or one for all [1, D], and documents [N, D]."""
    products = asked.astype(np.float64) * found.astype(np.float64)
    cosines: Floats = np.clip(products.sum(axis=1), -1, 1)
    return cosines


def renamed(error: ApiError, places: list[str]) -> ApiError:
    """The error with the request's name for what it calls `input[3]`, if it is about a text."""
    param = error.param
    if param is None or not param.startswith("input["):
        return error
    return error.renamed(places[int(param.removeprefix("input[").partition("]")[0])])
