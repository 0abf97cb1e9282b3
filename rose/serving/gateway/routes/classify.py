"""POST /v1/classify, and /predict of text-embeddings-inference."""

import time
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
from starlette.responses import Response

from rose.models.card import ModelCard, ScoringCard
from rose.models.output import probabilities
from rose.serving.gateway.classes import Items, prepare_items
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.pairs import PairRules, PreparedPairs
from rose.serving.gateway.ranking_schemas import ClassifyAnswer, ClassifyRequest, Prediction
from rose.serving.gateway.routes.embeddings import ENCODE_IN_THREAD_NUMBERS
from rose.serving.gateway.routes.ranking import (
    check_count,
    check_names,
    query_prompt,
    run,
    take_direction,
)
from rose.serving.gateway.routes.rerank import usage_fields
from rose.serving.gateway.routes.vector_ranking import usage_of
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.truncation import limit_of

Rows = npt.NDArray[np.float64]


async def classify(call: Call[ClassifyRequest]) -> Response:
    """Classifies texts, or pairs of texts."""
    body = call.body
    if body.labels is not None:
        raise bad_request("'labels' is not supported: labels are the model's own.", "labels")
    items, is_list = _items(body, call.gateway.settings)
    check_names(body)
    take_direction(body)
    model = call.gateway.table.choose(body.model, "classify", doing="classify texts")
    facts = model.card.scoring
    assert facts is not None
    rules = _rules(body, model.card, call.gateway.settings)
    tokenizer = await model.tokenizer(call.gateway.pool)
    started = time.perf_counter()
    work = await call.in_thread(prepare_items, model.card, tokenizer, rules, items)
    call.tokenized(model.name, started)
    answer = await run(call, body, model, work, list(items))
    rows = answer.scores.astype(np.float64)
    chances = probabilities(rows, facts.probabilities)
    shown = rows if body.raw_scores else chances

    def encode() -> bytes:
        if body.inputs is None:
            return orjson.dumps(_answer(call, model.name, facts, work, shown))
        texts = [_predictions(facts, row) for row in shown]
        return orjson.dumps(texts if is_list else texts[0])

    # Labels may be many: thousands for each text.
    content = await call.in_thread(encode) if shown.size > ENCODE_IN_THREAD_NUMBERS else encode()
    return Response(content, media_type="application/json")


def _rules(body: ClassifyRequest, card: ModelCard, settings: GatewaySettings) -> PairRules:
    assert card.scoring is not None
    return PairRules(limit_of(body, card, settings), prompt=query_prompt(body, card.scoring))


def _items(body: ClassifyRequest, settings: GatewaySettings) -> tuple[Items, bool]:
    """The texts and pairs, by their places in the request, and whether they came as a list."""
    if body.input is not None and body.inputs is not None:
        raise bad_request("Give 'input' or 'inputs', not both.", "inputs")
    name = "input" if body.inputs is None else "inputs"
    value = body.input if body.inputs is None else body.inputs
    if value is None:
        raise bad_request("'input' is missing.", "input")
    if isinstance(value, str):
        return {name: value}, False
    check_count(name, value, settings)
    is_one = name == "inputs" and all(isinstance(item, str) for item in value)
    if is_one:  # TEI: a bare list of strings is one text or one pair
        return {name: _item(name, cast("list[str]", value))}, False
    return {f"{name}[{i}]": _item(f"{name}[{i}]", item) for i, item in enumerate(value)}, True


def _item(place: str, item: str | list[str]) -> str | tuple[str, str]:
    """A text, or a pair of texts."""
    if isinstance(item, str):
        return item
    if len(item) not in (1, 2):
        message = f"'{place}' has {len(item)} texts; possible: 1, or 2 for a pair."
        raise bad_request(message, place)
    return item[0] if len(item) == 1 else (item[0], item[1])


def _predictions(facts: ScoringCard, row: Rows) -> list[dict[str, Any]]:
    """Labels and their numbers, the largest first."""
    order = np.argsort(-row, kind="stable").tolist()
    return [{"score": float(row[i]), "label": facts.labels[i]} for i in order]


def _answer(
    call: Call[Any], name: str, facts: ScoringCard, work: PreparedPairs, rows: Rows
) -> dict[str, Any]:
    return {
        "id": call.exchange.request_id,
        "object": "list",
        "model": name,
        "labels": list(facts.labels),
        "data": [_classification(facts, index, row) for index, row in enumerate(rows)],
        "usage": usage_fields(usage_of(sum(map(len, work.ids)), work.truncated)),
    }


def _classification(facts: ScoringCard, index: int, row: Rows) -> dict[str, Any]:
    best = int(np.argmax(row))
    return {
        "index": index,
        "object": "classification",
        "label": facts.labels[best],
        "score": float(row[best]),
        "probs": row.tolist(),
        "num_classes": len(facts.labels),
    }


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/classify",
        aliases=("/classify", "/predict"),
        handler=classify,
        summary="Classify texts",
        description="Labels of texts, or of pairs of texts, with their probabilities. With "
        "`inputs` the answer has the form of TEI.",
        tag="Ranking",
        body=ClassifyRequest,
        answer=ClassifyAnswer | list[Prediction | list[Prediction]],
        example={"input": ["a red kite over the hill"]},
        statuses=BODY_ERRORS,
    ),
)
