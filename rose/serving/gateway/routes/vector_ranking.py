"""Ranking by vectors: the cosine of those of texts, or the best matches of those of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.models.card import EmbeddingCard, LateInteraction
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
    raw: npt.NDArray[np.float64]
    scores: npt.NDArray[np.float64]
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
    late = card.late if card else None
    unfit = {
        "instruction": bool(body.instruction),
        "truncation_strategy": body.truncation_strategy == "only_second",
        "max_chunks_per_doc": body.max_chunks_per_doc not in (None, 1),
    }
    how = "cosine" if late is None else "vectors of tokens"
    for name, is_unfit in unfit.items():
        if is_unfit:
            message = f"'{name}' does not go with '{model.name}', which ranks by {how}."
            raise bad_request(message, name)
    if card is None or late is None:
        return await _by_cosine(call, body, model, queries, documents)
    return await _by_matches(call, body, model, card, late, queries, documents)


async def _by_matches(
    call: Call[Any],
    body: PairRequest,
    model: ServedModel,
    card: EmbeddingCard,
    late: LateInteraction,
    queries: Places,
    documents: Places,
) -> Scored:
    """Scores pairs by vectors of tokens, of few enough documents at a time to hold them."""
    asked, tokens, truncated = [], 0, 0
    scores = []
    for part in _parts(queries, MAX_NUMBERS_PER_TOKEN // (card.dimensions * late.query_length)):
        done = await _vectors(call, body, model, part, is_query=True)
        asked += done.token_vectors()
        tokens, truncated = tokens + done.tokens, truncated + done.work.truncated
    size = MAX_NUMBERS_PER_TOKEN // (card.dimensions * late.document_length)
    at = 0
    for part in _parts(documents, size):
        done = await _vectors(call, body, model, part, is_query=False)
        own = asked if len(queries) == 1 else asked[at : at + len(part)]
        scores.append(await call.in_thread(maxsim, own, done.token_vectors(), mean=late.mean))
        tokens, truncated = tokens + done.tokens, truncated + done.work.truncated
        at += len(part)
    found = np.concatenate(scores)
    return Scored(model.name, found, found, usage_of(tokens, truncated))


def _parts(texts: Places, size: int) -> list[dict[str, str]]:
    """Texts in groups of at most `size`, at least one."""
    items, size = list(texts.items()), max(1, size)
    return [dict(items[at : at + size]) for at in range(0, len(items), size)]


async def _by_cosine(
    call: Call[Any], body: PairRequest, model: ServedModel, queries: Places, documents: Places
) -> Scored:
    """Scores pairs by the cosine of their vectors, with the embedder's prompts for both."""
    asked = await _vectors(call, body, model, queries, is_query=True)
    found = await _vectors(call, body, model, documents, is_query=False)
    cosines = await call.in_thread(_cosines, asked.answer.vectors, found.answer.vectors)
    truncated = asked.work.truncated + found.work.truncated
    return Scored(model.name, cosines, cosines, usage_of(asked.tokens + found.tokens, truncated))


def _cosines(asked: npt.NDArray[Any], found: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The cosines of unit vectors: queries [N, D], or one for all [1, D], and documents [N, D]."""
    products = asked.astype(np.float64) * found.astype(np.float64)
    cosines: npt.NDArray[np.float64] = np.clip(products.sum(axis=1), -1, 1)
    return cosines


async def _vectors(
    call: Call[Any], body: PairRequest, model: ServedModel, texts: Places, *, is_query: bool
) -> Embedded:
    """Embeds the queries or the documents; errors name the texts as the request does."""
    late = model.card.embedding.late if model.card.embedding else None
    asks = is_query and (body.prompt is not None or body.prompt_name is not None) and late is None
    request = EmbeddingRequest(
        model=model.name,
        input=list(texts.values()),
        normalize=True if late is None else None,
        prompt=body.prompt if is_query else None,
        prompt_name=body.prompt_name if is_query else None,
        input_type=None if asks else ("query" if is_query else "document"),
        truncate=body.truncate,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        priority=body.priority,
    )
    if not is_query and body.max_tokens_per_doc is not None:
        limit = limit_of(body, model.card, call.gateway.settings)
        request.truncate = None
        request.truncate_prompt_tokens = min(body.max_tokens_per_doc, limit.tokens)
    places = list(texts)
    cut_by_document = not is_query and body.max_tokens_per_doc is not None
    try:
        if late is None:
            return await embed(call, request)
        return await embed(call, request, outputs=("multi_vector",), tasks=("score",))
    except EngineError as error:
        raise renamed(from_engine(error), places) from error
    except ApiError as error:
        if cut_by_document and error.param == "truncate_prompt_tokens":
            raise error.renamed("max_tokens_per_doc") from None
        raise renamed(error, places) from None


def renamed(error: ApiError, places: list[str]) -> ApiError:
    """The error with the request's name for what it calls `input[3]`, if it is about a text."""
    param = error.param
    if param is None or not param.startswith("input["):
        return error
    return error.renamed(places[int(param.removeprefix("input[").partition("]")[0])])
