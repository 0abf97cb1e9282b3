"""From a request to scores: of pairs, by a ranker or by the cosine of vectors, and of classes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from rose.models.card import ModelCard, ScoringCard
from rose.models.output import activate_scores
from rose.serving.client_api import EngineError, ScoreAnswer
from rose.serving.gateway.errors import ApiError, bad_request, from_engine
from rose.serving.gateway.models import ServedModel
from rose.serving.gateway.operation import Call
from rose.serving.gateway.pairs import PairRules, PreparedPairs, prepare_pairs
from rose.serving.gateway.ranking_schemas import PairRequest, ScoringRequest, TextItem
from rose.serving.gateway.routes.embeddings import Embedded, embed
from rose.serving.gateway.schemas import EmbeddingRequest, Usage
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.truncation import limit_of

Places = Mapping[str, str]  # texts by their places in the request

RANK = "rank documents"


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


async def score_pairs(
    call: Call[Any], body: PairRequest, queries: Places, documents: Places
) -> Scored:
    """Scores pairs, in whatever route they came.

    Args:
        call: The request.
        body: How pairs are read.
        queries: One for all documents, or as many as these.
        documents: At least one.

    Raises:
        ApiError: The request is wrong, or its scores are not finite.
        EngineError: The engine failed.
    """
    take_direction(body)
    model = _choose(call, body.model)
    if model.card.scoring is None:
        return await _by_cosine(call, body, model, queries, documents)
    card = model.card
    rules = _rules(body, card, call.gateway.settings)
    tokenizer = await model.tokenizer(call.gateway.pool)
    started = time.perf_counter()
    work = await call.in_thread(prepare_pairs, card, tokenizer, rules, queries, documents)
    call.gateway.metrics.tokenized(model.name, started)
    answer = await run(call, body, model, work, list(documents))
    raw = answer.scores[:, 0].astype(np.float64)
    facts = card.scoring
    assert facts is not None
    scores = raw if body.raw_scores else activate_scores(raw, facts.activation)
    return Scored(model.name, raw, scores, usage_of(sum(map(len, work.ids)), work.truncated))


async def run(
    call: Call[Any],
    body: ScoringRequest,
    model: ServedModel,
    work: PreparedPairs,
    places: list[str],
) -> ScoreAnswer:
    """Lets the engine score; its errors name the text at fault as the request does.

    Raises:
        ApiError: A score is not finite.
        EngineError: The engine failed.
    """
    try:
        answer = await model.client.score(
            work.ids,
            work.segments,
            priority=body.priority or "online",
            timeout_s=call.time_left_s(),
            trace=call.exchange.request_id,
        )
    except EngineError as error:
        raise _renamed(from_engine(error), places) from error
    bad = np.flatnonzero(~np.isfinite(answer.scores).all(axis=1))
    if len(bad):
        place = places[bad[0]]
        message = f"The model's score for '{place}' is not finite."
        raise ApiError(500, message, param=place, code="non_finite")
    _count(call, model, work, answer)
    return answer


def check_count(field: str, items: Sequence[object], settings: GatewaySettings) -> None:
    """Refuses a list that is empty, or has more items than a request may have.

    Raises:
        ApiError: 400.
    """
    if not items:
        raise bad_request(f"'{field}' is an empty list.", field)
    if len(items) > settings.max_inputs:
        message = f"'{field}' has {len(items)} items; at most {settings.max_inputs} a request."
        raise bad_request(message, field)


def take_direction(body: ScoringRequest) -> None:
    """Reads TEI's name of `truncation_side`.

    Raises:
        ApiError: 400, they contradict each other.
    """
    if body.truncation_direction is None:
        return
    side = cast("Literal['left', 'right']", body.truncation_direction.lower())
    if body.truncation_side not in (None, side):
        message = "'truncation_direction' contradicts 'truncation_side'."
        raise bad_request(message, "truncation_direction")
    body.truncation_side = side


def query_prompt(body: ScoringRequest, card: ScoringCard) -> str:
    """The text that goes before a query; empty: none.

    Raises:
        ApiError: 400, the model has no such prompt, or two are given.
    """
    if body.prompt is not None and body.prompt_name is not None:
        message = "'prompt' and 'prompt_name' are given; send one of them."
        raise bad_request(message, "prompt_name")
    if body.prompt is not None:
        return body.prompt
    name = card.default_prompt_name if body.prompt_name is None else body.prompt_name
    if name is None:
        return ""
    if name not in card.prompts:
        known = ", ".join(f"'{known}'" for known in sorted(card.prompts)) or "none"
        message = f"'prompt_name' is '{name[:100]}'; prompts of this model: {known}."
        raise bad_request(message, "prompt_name")
    return card.prompts[name]


def text_of(item: str | TextItem) -> str:
    """The text of an item."""
    return item if isinstance(item, str) else item.text


def usage_of(tokens: int, truncated: int) -> Usage:
    """Token counts to report."""
    return Usage(prompt_tokens=tokens, total_tokens=tokens, truncated_tokens=truncated)


def _choose(call: Call[Any], name: str | None) -> ServedModel:
    """The model for pairs: one that scores, or an embedder where the server allows that."""
    table = call.gateway.table
    if not call.gateway.settings.rank_by_cosine:
        return table.choose(name, "score", doing=RANK)
    if name is None and table.can("score"):
        return table.choose(None, "score", doing=RANK)
    return table.choose(name, "score", "embed", doing=RANK)


def _rules(body: PairRequest, card: ModelCard, settings: GatewaySettings) -> PairRules:
    facts = card.scoring
    assert facts is not None
    if body.max_chunks_per_doc not in (None, 1):
        raise bad_request("'max_chunks_per_doc' is not supported.", "max_chunks_per_doc")
    if body.instruction:
        _check_instruction(body, card)
    limit = limit_of(body, card, settings)
    only_second = body.truncation_strategy == "only_second"
    if body.max_tokens_per_doc is not None and body.truncate is None and not limit.cut:
        limit, only_second = replace(limit, cut=True), True  # it asks for documents to be cut
    return PairRules(
        limit=limit,
        only_second=only_second,
        max_document_tokens=body.max_tokens_per_doc,
        prompt=query_prompt(body, facts),
        instruction=body.instruction,
    )


def _check_instruction(body: PairRequest, card: ModelCard) -> None:
    facts = card.scoring
    if facts is None or (facts.template is None and facts.chat is None):
        message = (
            f"'instruction': the prompt of '{card.name}' has no place for one; 'prompt' puts a "
            "text before the query."
        )
        raise bad_request(message, "instruction")
    if facts.template is None and (body.prompt is not None or body.prompt_name is not None):
        message = "'instruction' and a prompt are given; this model takes one of them."
        raise bad_request(message, "instruction")


async def _by_cosine(
    call: Call[Any], body: PairRequest, model: ServedModel, queries: Places, documents: Places
) -> Scored:
    """Scores pairs by the cosine of their vectors, with the embedder's prompts for both."""
    unfit = {
        "instruction": bool(body.instruction),
        "truncation_strategy": body.truncation_strategy == "only_second",
        "max_chunks_per_doc": body.max_chunks_per_doc not in (None, 1),
    }
    for name, is_unfit in unfit.items():
        if is_unfit:
            message = f"'{name}' does not go with '{model.name}', which ranks by cosine."
            raise bad_request(message, name)
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
    asks = is_query and (body.prompt is not None or body.prompt_name is not None)
    request = EmbeddingRequest(
        model=model.name,
        input=list(texts.values()),
        normalize=True,
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
        return await embed(call, request)
    except EngineError as error:
        raise _renamed(from_engine(error), places) from error
    except ApiError as error:
        if cut_by_document and error.param == "truncate_prompt_tokens":
            raise error.renamed("max_tokens_per_doc") from None
        raise _renamed(error, places) from None


def _renamed(error: ApiError, places: list[str]) -> ApiError:
    """The error with the request's name for what it calls `input[3]`, if it is about a text."""
    param = error.param
    if param is None or not param.startswith("input["):
        return error
    return error.renamed(places[int(param.removeprefix("input[").partition("]")[0])])


def _count(call: Call[Any], model: ServedModel, work: PreparedPairs, answer: ScoreAnswer) -> None:
    metrics, name = call.gateway.metrics, model.name
    metrics.tokens.labels(name).inc(sum(map(len, work.ids)))
    metrics.truncated.labels(name).inc(work.truncated)
    metrics.batch_size.labels(name).observe(len(work.ids))
    metrics.queue_seconds.labels(name).observe(answer.queued_s)
    metrics.compute_seconds.labels(name).observe(answer.computed_s)
