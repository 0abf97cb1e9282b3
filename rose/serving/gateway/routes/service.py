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
from rose.serving.gateway.workers import HEADER, Reply, merged


async def health(_: Call[None]) -> Response:
    """Answers as long as the gateway's event loop turns."""
    return json_response(Health(version=__version__))


async def ready(call: Call[None]) -> Response:
    """Answers 200 when every engine takes work."""
    reasons = [*call.gateway.table.unready_reasons(), *await _reasons_of_others(call)]
    if reasons:
        raise ApiError(503, " ".join(reasons), code="unavailable")
    return json_response(Ready(models=[model.name for model in call.gateway.table]))


async def _reasons_of_others(call: Call[None]) -> list[str]:
    """Why other gateway workers, which get requests too, are not ready."""
    replies = await _ask_others(call, "/ready")
    reasons = []
    for number, reply in replies.items():
        if reply is None:
            reasons.append(f"Gateway worker {number} does not answer.")
        elif reply.status != 200:
            message = orjson.loads(reply.body)["error"]["message"]
            reasons.append(f"Gateway worker {number}: {message}")
    return reasons


async def metrics(call: Call[None]) -> Response:
    """Prometheus' text format; of all gateway workers, whichever is asked."""
    gateway, workers = call.gateway, call.gateway.workers
    content = gateway.metrics.exposition()
    if workers is not None and HEADER not in call.request.headers:
        replies = await _ask_others(call, "/metrics")
        parts = {n: reply.body for n, reply in replies.items() if reply and reply.status == 200}
        content = await call.in_thread(merged, {workers.own: content, **parts}, workers.own)
    return Response(content, headers={"Content-Type": CONTENT_TYPE})


async def _ask_others(call: Call[None], path: str) -> dict[int, Reply | None]:
    """GET a path from the other gateway workers, unless one of them asks."""
    workers, keys = call.gateway.workers, call.gateway.settings.api_keys
    if workers is None or HEADER in call.request.headers:
        return {}
    return await workers.ask(path, {"Authorization": f"Bearer {keys[0]}"} if keys else {})


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
