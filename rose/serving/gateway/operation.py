"""A route of the API: how it is declared, and the way of a request through it.

To add a route, write a handler and an `Operation` in a module of `routes`, and list it there;
OpenAPI and /docs follow from the declaration.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from types import UnionType
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rose.serving import tracing
from rose.serving.client_api import EngineError
from rose.serving.gateway.body import LARGE_BYTES, check_content_type, read_body
from rose.serving.gateway.errors import ApiError, bad_request, from_engine
from rose.serving.gateway.gateway import BodyMemory, Gateway, Place
from rose.serving.gateway.json_guard import decode
from rose.serving.gateway.schemas import Request as RequestBody
from rose.serving.gateway.tokenization import TextError

# What any route with a body can answer beside a success.
BODY_ERRORS = (400, 404, 413, 415, 429, 500, 503, 504)

BodyT = TypeVar("BodyT")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Exchange:
    """A request as the outermost layer sees it; inner layers fill it in."""

    request_id: str
    route: str = "other"
    started: float = field(default_factory=time.perf_counter)
    status: int = 0

    @classmethod
    def of(cls, scope: Scope) -> "Exchange":
        """The exchange that a scope belongs to."""
        found = scope["rose.exchange"]
        assert isinstance(found, cls)
        return found


@dataclass(frozen=True)
class Call(Generic[BodyT]):
    """What a handler gets.

    Attributes:
        gateway: Models, settings, metrics, threads.
        request: Path parameters and headers; the body has been read.
        body: The parsed body; None for a route without.
        exchange: Request id and start.
        size: Bytes of the body as it came.
    """

    gateway: Gateway
    request: Request
    body: BodyT
    exchange: Exchange
    size: int = 0

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs CPU work off the event loop."""
        is_large = self.size > LARGE_BYTES
        pool = self.gateway.heavy_pool if is_large else self.gateway.pool
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, partial(work, *args, **kwargs))

    def tokenized(self, model: str, started: float) -> None:
        """Notes that texts were made into tokens, from `started` (perf_counter) until now."""
        seconds = time.perf_counter() - started
        tracing.record("tokenize", seconds, model=model)
        metrics = self.gateway.metrics
        metrics.later(lambda: metrics.tokenize_seconds.labels(model).observe(seconds))

    def time_left_s(self) -> float | None:
        """Seconds until the request's deadline; None if it has none."""
        limit = self.gateway.settings.request_timeout_s
        if limit is None:
            return None
        return max(0.0, limit - (time.perf_counter() - self.exchange.started))


Handler = Callable[[Call[Any]], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        path: Starlette's form, such as "/v1/models/{name:path}".
        aliases: Other paths that do the same.
        body: Struct that the JSON body is decoded into; None: there is no body.
        answer: Type of a success as msgspec reads it, or the media type of one that is not JSON.
        example: A body to try.
        statuses: Errors that the route can answer with.
        guarded: Whether it needs a key, where the server has keys.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    summary: str
    tag: str
    answer: type[msgspec.Struct] | type[list[Any]] | UnionType | str
    description: str = ""
    aliases: tuple[str, ...] = ()
    body: type[msgspec.Struct] | None = None
    example: dict[str, Any] | None = None
    statuses: tuple[int, ...] = ()
    guarded: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths that lead here."""
        return self.path, *self.aliases


class Endpoint:
    """The ASGI application of an operation: body in, handler, answer out."""

    def __init__(self, gateway: Gateway, operation: Operation) -> None:
        self.gateway = gateway
        self.operation = operation
        self.decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(operation.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; errors are raised to the outermost layer."""
        exchange = Exchange.of(scope)
        exchange.route = self.operation.path
        request = Request(scope, receive)
        if self.operation.body is None:
            response = await self._handle(Call(self.gateway, request, None, exchange))
        else:
            response = await self._with_body(request, exchange)
        await response(scope, receive, send)

    async def _with_body(self, request: Request, exchange: Exchange) -> Response:
        gateway, settings = self.gateway, self.gateway.settings
        headers, receive = request.headers, request.receive
        check_content_type(headers)
        gateway.check_place()
        with BodyMemory(gateway) as memory:
            # A body that does not come keeps nobody out: its place is taken when it is there.
            limits = settings.max_body_bytes, settings.body_timeout_s
            raw = await read_body(headers, receive, *limits, memory)
            with Place(gateway):
                work = self._decode_and_handle(request, raw, exchange)
                return await unless_disconnected(receive, work)

    async def _decode_and_handle(
        self, request: Request, raw: bytes, exchange: Exchange
    ) -> Response:
        size = len(raw)
        if size > LARGE_BYTES:
            reading = Call(self.gateway, request, None, exchange, size)
            body = await reading.in_thread(decode, raw, self.decoder)
        else:
            body = decode(raw, self.decoder)
        if isinstance(body, RequestBody) and body.request_id is not None:
            exchange.request_id = checked_request_id(body.request_id)
        return await self._handle(Call(self.gateway, request, body, exchange, size))

    async def _handle(self, call: Call[Any]) -> Response:
        limit = call.time_left_s() if self.operation.body else None
        try:
            async with asyncio.timeout(limit):
                return await self.operation.handler(call)
        except EngineError as error:
            raise from_engine(error) from error
        except TextError as error:
            raise bad_request(str(error)) from error
        except TimeoutError:
            message = f"No answer within {self.gateway.settings.request_timeout_s:g} seconds."
            raise ApiError(504, message, code="deadline") from None


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it if the client leaves before it is done.

    The work is part of the task that waits: one of its own would take its turns of the event loop.

    Raises:
        ClientDisconnect: The client left.
    """
    task = asyncio.current_task()
    assert task is not None
    watch = asyncio.create_task(_disconnect(receive))
    has_left = False

    def leave(watch: asyncio.Task[None]) -> None:
        nonlocal has_left
        if watch.cancelled():
            return  # by who ends the event loop, which cancels the work too
        has_left = True
        task.cancel()

    watch.add_done_callback(leave)
    try:
        return await work
    finally:
        watch.remove_done_callback(leave)
        watch.cancel()
        if has_left and task.uncancel() == 0:  # else somebody else cancels the task too
            raise ClientDisconnect


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def new_request_id(given: str | None) -> str:
    """The id that a client sent in a header, if it is fit to be sent back, or a new one."""
    return given if given and _is_fit(given) else f"req-{os.urandom(12).hex()}"


def checked_request_id(given: str) -> str:
    """A request id out of a body.

    Raises:
        ApiError: 400, it cannot be sent back in a header.
    """
    if not _is_fit(given):
        message = "'request_id' must be 1 to 128 printable ASCII characters."
        raise bad_request(message, "request_id")
    return given


def _is_fit(text: str) -> bool:
    return 0 < len(text) <= 128 and text.isascii() and text.isprintable()
