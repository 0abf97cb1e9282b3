"""The same small route in several frameworks, as `tools.gateway_cost` measures them."""

import importlib.util
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import orjson

VECTOR = orjson.dumps({"data": [{"index": 0, "embedding": [i / 7919 for i in range(384)]}]})

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Body(msgspec.Struct):
    """What a request has to hold."""

    input: str | list[str]
    encoding_format: str = "float"


async def asgi(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """No framework."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body, more = b"", True
    while more and scope["method"] == "POST":
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if body:
        msgspec.json.decode(body, type=Body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(VECTOR)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": VECTOR})


if importlib.util.find_spec("starlette"):
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def _starlette(request: Request) -> Response:
        if body := await request.body():
            msgspec.json.decode(body, type=Body)
        return Response(VECTOR, media_type="application/json")

    starlette = Starlette(
        routes=[
            Route("/v1/embeddings", _starlette, methods=["POST"]),
            Route("/ready", _starlette),
        ]
    )

if importlib.util.find_spec("litestar"):
    import litestar as library

    @library.post("/v1/embeddings", status_code=200)
    async def _litestar(data: Body) -> library.Response[bytes]:  # noqa: ARG001 - decoded, that is all
        return library.Response(VECTOR, media_type="application/json")

    @library.get("/ready")
    async def _ready() -> dict[str, str]:
        return {}

    litestar = library.Litestar([_litestar, _ready])
