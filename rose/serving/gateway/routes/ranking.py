"""From a request to scores: of pairs, by a ranker or by vectors, and of classes."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np

from rose.models.card import ModelCard, ScoringCard
from rose.models.output import activate_scores
from rose.serving.client_api import EngineError, ScoreAnswer
from rose.serving.gateway.errors import ApiError, bad_request, from_engine
from rose.serving.gateway.models import ServedModel
from rose.serving.gateway.operation import Call
from rose.serving.gateway.pairs import PairRules, PreparedPairs, prepare_pairs
from rose.serving.gateway.ranking_schemas import PairRequest, ScoringRequest, TextItem
from rose.serving.gateway.routes.vector_ranking import (
    Places,
    Scored,
    renamed,
    score_vectors,
    usage_of,
)
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.truncation import limit_of

RANK = "rank documents"


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
    check_names(body)
    take_direction(body)
    model = _choose(call, body.model)
    if model.card.scoring is None:
        return await score_vectors(call, body, model, queries, documents)
    card = model.card
    rules = _rules(body, card, call.gateway.settings)
    tokenizer = await model.tokenizer(call.gateway.pool)
    started = time.perf_counter()
    work = await call.in_thread(prepare_pairs, card, tokenizer, rules, queries, documents)
    call.tokenized(model.name, started)
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
            trace=call.exchange.request_id,
        )
    except EngineError as error:
        raise renamed(from_engine(error), places) from error
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


def check_names(body: ScoringRequest) -> None:
    """Refuses what other servers call by another name, where it asks for something else.

    Raises:
        ApiError: 400.
    """
    if body.use_activation is False:
        raise bad_request("'use_activation' is not supported: use 'raw_scores'.", "use_activation")


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


def _count(call: Call[Any], model: ServedModel, work: PreparedPairs, answer: ScoreAnswer) -> None:
    metrics, tokens = call.gateway.metrics, sum(map(len, work.ids))
    numbers = len(work.ids), tokens, work.truncated, answer.queued_s, answer.computed_s
    metrics.later(partial(metrics.fed, model.name, *numbers))
