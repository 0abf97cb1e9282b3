"""Answers as server-sent events.

The grammar of a stream: events as they come, each `data: {JSON in ASCII}` and an empty line, then
`data: [DONE]`. What fails before the first event is an answer of its own with its HTTP status.
What fails later is one event `data: {"error": {...}}`, after which the stream ends without
`[DONE]`: the OpenAI client raises on such an event, and others see that the end is missing.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rose.serving.client_api import EngineError
from rose.serving.gateway.ascii_json import escaped
from rose.serving.gateway.errors import ApiError, from_engine, shutting_down
from rose.serving.gateway.gateway import Gateway, Place
from rose.serving.gateway.operation import unless_disconnected

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# Time for a client to take the event that tells it that its time is over.
LAST_WORD_S = 5.0

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """A stream of events. It ends at once when the client leaves."""

    def __init__(
        self,
        gateway: Gateway,
        events: Callable[[], AsyncGenerator[bytes, None]],
        time_left_s: Callable[[], float | None],
    ) -> None:
        """Prepares a stream; nothing runs before it is called.

        Args:
            gateway: Where it takes a place among the requests that are served.
            events: Starts the work and gives one or several events at a time.
            time_left_s: Seconds until the request's deadline.
        """
        super().__init__()
        self._gateway = gateway
        self._events = events
        self._time_left_s = time_left_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Sends the stream.

        Raises:
            ApiError: It failed before anything was sent.
            ClientDisconnect: The client left.
        """
        with Place(self._gateway):
            await unless_disconnected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        error = await self._send_events(send)
        if error is None:
            await send(_part(DONE, more=False))
            return
        if not self._started:
            raise error
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await send(_part(event(escaped(bytes(error.response().body))), more=False))

    async def _send_events(self, send: Send) -> ApiError | None:
        """Sends all events; returns what went wrong, if anything did."""
        try:
            async with asyncio.timeout(self._time_left_s()):
                async with aclosing(self._events()) as batches:
                    async for batch in batches:
                        if not self._started:
                            await send(_START)
                            self._started = True
                        await send(_part(batch, more=True))
        except ApiError as error:
            return error
        except EngineError as error:
            return from_engine(error)
        except TimeoutError:
            limit = self._gateway.settings.request_timeout_s
            return ApiError(504, f"No answer within {limit:g} seconds.", code="deadline")
        except asyncio.CancelledError:  # the client left, or the server ends
            return shutting_down()
        except Exception:
            log.exception("a stream failed")
            return ApiError(500, "An internal error; the server's log has it.", code="internal")
        return None


def event(body: bytes) -> bytes:
    """One event."""
    return b"data: %b\n\n" % body


_START: Message = {"type": "http.response.start", "status": 200, "headers": _HEADERS}


def _part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
