"""GET /v1/models."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from rose.serving.gateway.operation import Call, Operation
from rose.serving.gateway.schemas import ModelInfo, ModelList


async def list_models(call: Call[None]) -> Response:
    """All served models."""
    return json_response(ModelList(data=[model.info() for model in call.gateway.table]))


async def one_model(call: Call[None]) -> Response:
    """One served model."""
    return json_response(call.gateway.table.named(call.request.path_params["model"]).info())


def json_response(body: msgspec.Struct | Sequence[Any]) -> Response:
    """An answer out of a struct, or a list of them."""
    return Response(msgspec.json.encode(body), media_type="application/json")


OPERATIONS = (
    Operation(
        method="GET",
        path="/v1/models",
        handler=list_models,
        summary="List the served models",
        tag="Models",
        answer=ModelList,
    ),
    Operation(
        method="GET",
        path="/v1/models/{model:path}",
        handler=one_model,
        summary="One served model",
        tag="Models",
        answer=ModelInfo,
        statuses=(404,),
    ),
)
