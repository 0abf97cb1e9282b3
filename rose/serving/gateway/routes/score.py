"""POST /v1/score."""

import orjson
from starlette.responses import Response

from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.ranking_schemas import ScoreAnswer, ScoreRequest, Text
from rose.serving.gateway.routes.ranking import check_count, score_pairs, text_of
from rose.serving.gateway.routes.rerank import usage_fields
from rose.serving.gateway.settings import GatewaySettings


async def score(call: Call[ScoreRequest]) -> Response:
    """Scores pairs of texts."""
    body = call.body
    settings = call.gateway.settings
    first = _texts(body, settings, "text_1", "queries")
    second = _texts(body, settings, "text_2", "documents")
    if len(first) not in (1, len(second)):
        name = next(iter(first)).partition("[")[0]
        message = (
            f"'{name}' has {len(first)} texts and there are {len(second)} to pair them with; "
            "possible: one, or as many."
        )
        raise bad_request(message, name)
    done = await score_pairs(call, body, first, second)
    content = {
        "id": call.exchange.request_id,
        "object": "list",
        "model": done.model,
        "data": [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(done.scores.tolist())
        ],
        "usage": usage_fields(done.usage),
    }
    return Response(orjson.dumps(content), media_type="application/json")


def _texts(body: ScoreRequest, settings: GatewaySettings, name: str, other: str) -> dict[str, str]:
    """The texts of one side of the pairs, by their places in the request."""
    given = [field for field in (name, other) if getattr(body, field) is not None]
    if not given:
        raise bad_request(f"'{name}' is missing.", name)
    if len(given) > 1:
        raise bad_request(f"Give '{name}' or '{other}', not both.", other)
    value: Text | list[Text] = getattr(body, given[0])
    if not isinstance(value, list):
        return {given[0]: text_of(value)}
    check_count(given[0], value, settings)
    return {f"{given[0]}[{i}]": text_of(item) for i, item in enumerate(value)}


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/score",
        aliases=("/score",),
        handler=score,
        summary="Score pairs of texts",
        description="One text with each of several others, or as many with as many, in order.",
        tag="Ranking",
        body=ScoreRequest,
        answer=ScoreAnswer,
        example={"text_1": "a bird of prey", "text_2": ["a red kite", "a cup of tea"]},
        statuses=BODY_ERRORS,
    ),
)
