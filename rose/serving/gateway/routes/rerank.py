"""POST /v1/rerank, in the forms of Cohere and Jina, and of text-embeddings-inference."""

from typing import Any

import orjson
from starlette.responses import Response

from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.ranking_schemas import RankedText, RerankAnswer, RerankRequest
from rose.serving.gateway.routes.ranking import check_count, score_pairs, text_of
from rose.serving.gateway.routes.vector_ranking import Scored
from rose.serving.gateway.schemas import Usage
from rose.serving.gateway.settings import GatewaySettings


async def rerank(call: Call[RerankRequest]) -> Response:
    """Ranks documents by a query."""
    body = call.body
    if body.rank_fields not in (None, [], ["text"]):
        raise bad_request("'rank_fields' is not supported: give texts.", "rank_fields")
    documents = _documents(body, call.gateway.settings)
    if body.query is None:
        raise bad_request("'query' is missing.", "query")
    done = await score_pairs(call, body, {"query": text_of(body.query)}, documents)
    order = done.order()[: body.top_n]
    texts = list(documents.values()) if body.return_documents or body.return_text else None
    content: object
    if body.texts is not None:
        content = [_ranked_text(done, index, texts) for index in order]
    else:
        content = _answer(call, done, [_ranked(done, index, texts) for index in order])
    return Response(orjson.dumps(content), media_type="application/json")


def _documents(body: RerankRequest, settings: GatewaySettings) -> dict[str, str]:
    """The documents, by their places in the request."""
    if body.documents is not None and body.texts is not None:
        raise bad_request("Give 'documents' or 'texts', not both.", "texts")
    name = "documents" if body.texts is None else "texts"
    items = body.documents if body.texts is None else body.texts
    if items is None:
        raise bad_request("'documents' is missing.", "documents")
    check_count(name, items, settings)
    return {f"{name}[{i}]": text_of(item) for i, item in enumerate(items)}


def _ranked(done: Scored, index: int, texts: list[str] | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"index": index, "relevance_score": float(done.scores[index])}
    return entry if texts is None else {**entry, "document": {"text": texts[index]}}


def _ranked_text(done: Scored, index: int, texts: list[str] | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"index": index, "score": float(done.scores[index])}
    return entry if texts is None else {**entry, "text": texts[index]}


def _answer(call: Call[Any], done: Scored, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": call.exchange.request_id,
        "model": done.model,
        "results": results,
        "usage": usage_fields(done.usage),
        "meta": {"tokens": {"input_tokens": done.usage.prompt_tokens}},
    }


def usage_fields(usage: Usage) -> dict[str, int]:
    """Token counts as an answer has them."""
    fields = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens}
    return fields | ({"truncated_tokens": usage.truncated_tokens} if usage.truncated_tokens else {})


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/rerank",
        aliases=("/rerank", "/v2/rerank"),
        handler=rerank,
        summary="Rank documents by a query",
        description="Scores of documents, the best first; equal ones in the order of the request. "
        "With `documents` the answer has the form of Cohere and Jina, with `texts` that of TEI.",
        tag="Ranking",
        body=RerankRequest,
        answer=RerankAnswer | list[RankedText],
        example={"query": "a bird of prey", "documents": ["a red kite", "a cup of tea"]},
        statuses=BODY_ERRORS,
    ),
)
