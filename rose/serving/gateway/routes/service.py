"""Health, readiness, metrics and the API's own description."""

from functools import lru_cache
from importlib import resources

import orjson
from starlette.responses import Response

from rose._version import __version__
from rose.serving.gateway.errors import ApiError
from rose.serving.gateway.metrics import CONTENT_TYPE
from rose.serving.gateway.operation import Call, Operation
from rose.serving.gateway.routes.models import json_response
from rose.serving.gateway.schemas import Health, Ready


async def health(_: Call[None]) -> Response:
    """Answers as long as the gateway's event loop turns."""
    return json_response(Health(version=__version__))


async def ready(call: Call[None]) -> Response:
    """Answers 200 when every engine takes work."""
    if reasons := call.gateway.table.unready_reasons():
        raise ApiError(503, " ".join(reasons), code="unavailable")
    return json_response(Ready(models=[model.name for model in call.gateway.table]))


async def metrics(call: Call[None]) -> Response:
    """Prometheus' text format."""
    return Response(call.gateway.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def openapi_json(call: Call[None]) -> Response:
    """The OpenAPI document."""
    return Response(_document(bool(call.gateway.keys)), media_type="application/json")


async def docs(_: Call[None]) -> Response:
    """The page that shows it."""
    return Response(_page(), headers=_PAGE_HEADERS, media_type="text/html")


_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; base-uri 'none'; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; frame-ancestors 'none'"
}


@lru_cache(maxsize=2)
def _document(guarded: bool) -> bytes:
    # Imported late: the list of all operations holds those of this module.
    from rose.serving.gateway.openapi import openapi
    from rose.serving.gateway.routes import OPERATIONS as ALL

    return orjson.dumps(openapi(ALL, guarded))


@lru_cache(maxsize=1)
def _page() -> bytes:
    return resources.files("rose.serving.gateway").joinpath("docs.html").read_bytes()


OPERATIONS = (
    Operation(
        method="GET",
        path="/health",
        handler=health,
        summary="Is the gateway alive?",
        tag="Service",
        answer=Health,
        guarded=False,
    ),
    Operation(
        method="GET",
        path="/ready",
        handler=ready,
        summary="Is every engine ready?",
        tag="Service",
        answer=Ready,
        statuses=(503,),
        guarded=False,
    ),
    Operation(
        method="GET",
        path="/metrics",
        handler=metrics,
        summary="Numbers for Prometheus",
        tag="Service",
        answer="text/plain",
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        handler=openapi_json,
        summary="This description",
        tag="Service",
        answer="application/json",
    ),
    Operation(
        method="GET",
        path="/docs",
        handler=docs,
        summary="This description as a page",
        tag="Service",
        answer="text/html",
    ),
)
