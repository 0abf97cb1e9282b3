"""The HTTP gateway: an ASGI application in front of engines."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose.serving import tracing
from rose.serving.client_api import EngineClient
from rose.serving.gateway.errors import ApiError, shutting_down
from rose.serving.gateway.gateway import Gateway
from rose.serving.gateway.models import ModelTable
from rose.serving.gateway.operation import Endpoint, Exchange, new_request_id
from rose.serving.gateway.routes import OPERATIONS
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.workers import Workers

log = logging.getLogger(__name__)

UNTRACED = ("/health", "/ready", "/metrics")  # asked all the time


def create_app(
    clients: Mapping[str, EngineClient] | ModelTable,
    settings: GatewaySettings | None = None,
    workers: Workers | None = None,
) -> Starlette:
    """Builds the gateway.

    Args:
        clients: A client for each served name; a name that leads to the same client as another
            is an alias. They may still be connecting: their models answer 503 until ready.
        settings: What the operator chose.
        workers: The gateways that share the port, if there are several.
    """
    table = clients if isinstance(clients, ModelTable) else ModelTable(clients)
    gateway = Gateway(table, settings or GatewaySettings(), workers)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(table.keep_loaded(gateway.pool))
        yield
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        gateway.close()

    endpoints = [Endpoint(gateway, operation) for operation in OPERATIONS]
    frontdoor = Middleware(Frontdoor, gateway=gateway, endpoints=endpoints)
    app = Starlette(
        routes=[route for endpoint in endpoints for route in _routes(endpoint)],
        middleware=[*_cors(gateway.settings), frontdoor],
        exception_handlers={HTTPException: _raise_on},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


def _routes(endpoint: Endpoint) -> list[Route]:
    operation = endpoint.operation
    return [Route(path, endpoint, methods=[operation.method]) for path in operation.paths]


def _shortcuts(endpoints: Sequence[Endpoint]) -> dict[tuple[str, str], Endpoint]:
    """The endpoints of paths without parameters, by method and path.

    The router would try one route after the other.
    """
    return {
        (endpoint.operation.method, path): endpoint
        for endpoint in endpoints
        for path in endpoint.operation.paths
        if "{" not in path
    }


class Frontdoor:
    """The outermost layer: request ids, keys, errors, metrics and the log."""

    def __init__(self, app: ASGIApp, gateway: Gateway, endpoints: Sequence[Endpoint]) -> None:
        self.app = app
        self.gateway = gateway
        self.open_paths = _open_paths(gateway.settings)
        self.shortcuts = _shortcuts(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection event of the server."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        exchange = Exchange(new_request_id(_text(headers.get(b"x-request-id"))))
        scope["rose.exchange"] = exchange
        self.gateway.exchanges_in_flight += 1
        try:
            if tracing.is_on() and scope["path"] not in UNTRACED:
                await self._serve_traced(scope, receive, _Sender(send, exchange), headers)
            else:
                await self._serve(scope, receive, _Sender(send, exchange), headers)
        finally:
            self.gateway.exchanges_in_flight -= 1
            self._account(exchange, scope["method"])

    async def _serve_traced(
        self, scope: Scope, receive: Receive, send: "_Sender", headers: Mapping[bytes, bytes]
    ) -> None:
        exchange = send.exchange
        with tracing.request_span(scope["path"], _text(headers.get(b"traceparent"))) as span:
            try:
                await self._serve(scope, receive, send, headers)
            finally:
                tracing.end_request(
                    span,
                    method=scope["method"],
                    route=exchange.route,
                    status=exchange.status,
                    request_id=exchange.request_id,
                )

    async def _serve(
        self, scope: Scope, receive: Receive, send: "_Sender", headers: Mapping[bytes, bytes]
    ) -> None:
        try:
            self._check_key(scope["path"], _text(headers.get(b"authorization")))
            app = self.shortcuts.get((scope["method"], scope["path"]), self.app)
            await app(scope, receive, send)
        except ClientDisconnect:
            self.gateway.metrics.disconnects.labels(send.exchange.route).inc()
        except ApiError as error:
            await _answer(error, scope, receive, send)
        except asyncio.CancelledError:  # only the server does that, when it has to end
            request_id = send.exchange.request_id
            log.warning("request %s cut off", request_id, extra={"request_id": request_id})
            if not send.exchange.status:  # a stream has been told already
                await _answer(shutting_down(), scope, receive, send)
        except Exception:
            request_id = send.exchange.request_id
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
            message = "An internal error; the server's log has it."
            await _answer(ApiError(500, message, code="internal"), scope, receive, send)

    def _check_key(self, path: str, authorization: str | None) -> None:
        if path in self.open_paths or self.gateway.keys.admit(authorization):
            return
        message = "A valid API key is needed: send 'Authorization: Bearer KEY'."
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=headers)

    def _account(self, exchange: Exchange, method: str) -> None:
        seconds = time.perf_counter() - exchange.started
        metrics = self.gateway.metrics
        if exchange.status:
            metrics.later(partial(metrics.answered, exchange.route, exchange.status, seconds))
        if self.gateway.settings.log_requests or not exchange.status:
            log.info(
                "id=%s method=%s route=%s status=%s ms=%.1f",
                exchange.request_id,
                method[:10],
                exchange.route,
                exchange.status or "disconnected",
                seconds * 1e3,
                extra={"request_id": exchange.request_id},
            )


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")


class _Sender:
    """Sends messages to the client, with the request's id, and notes the status."""

    def __init__(self, send: Send, exchange: Exchange) -> None:
        self._send = send
        self.exchange = exchange

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.exchange.status = message["status"]
            header = (b"x-request-id", self.exchange.request_id.encode("ascii"))
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await self._send(message)


async def _answer(error: ApiError, scope: Scope, receive: Receive, send: _Sender) -> None:
    if send.exchange.status:  # an answer has begun: all that is left is to break it off
        raise error
    await error.response()(scope, receive, send)


async def _raise_on(_: Request, error: Exception) -> Response:
    """Passes what the router found wrong on to the front door, in the API's form."""
    assert isinstance(error, HTTPException)
    messages = {
        404: "There is no such route; GET /openapi.json lists them.",
        405: "This route does not support that method.",
    }
    message = messages.get(error.status_code, error.detail)
    raise ApiError(error.status_code, message, headers=error.headers)


def _cors(settings: GatewaySettings) -> list[Middleware]:
    """What lets pages of other origins use the API: outermost, so that errors can be read too."""
    if not settings.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


def _open_paths(settings: GatewaySettings) -> frozenset[str]:
    paths = {operation.path for operation in OPERATIONS if not operation.guarded}
    paths |= {"/metrics"} if settings.public_metrics else set()
    paths |= {"/docs", "/openapi.json"} if settings.public_docs else set()
    return frozenset(paths)
