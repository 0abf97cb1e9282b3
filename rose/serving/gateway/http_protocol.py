"""What the HTTP server's protocol lacks: limits of a head, and errors in the API's form."""

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.repeated import RepeatedWarning

MAX_HEAD_BYTES = 64 << 10  # of the path and of all headers
MAX_HEADERS = 256
HEAD_LIMIT_S = 30.0
LINGER_S = 1.0  # for a client to take an answer while it is still sending

NO_HTTP = "refused a request that is not valid HTTP, from %s"

log = logging.getLogger(__name__)
_no_http = RepeatedWarning(log, NO_HTTP)


class HttpProtocol(HttpToolsProtocol):
    """One connection. A head that is too large or too slow ends it."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._refusal: ApiError | None = None
        self._is_refused = False
        self._in_head = False
        self._head_number = 0  # of the requests on this connection
        self._parsed = 0  # bytes of the head that the parser has given
        self._received = 0  # bytes that came in reads of nothing but this head
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for a first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on."""
        if not self._is_refused:
            self._read(data)

    def _read(self, data: bytes) -> None:
        number = self._head_number
        self._feed(data)
        if self._is_over():
            return
        if self._in_head and self._head_number == number:
            # The parser gives a header when it is complete, which a large one may never be.
            self._received += len(data)
            if self._received > MAX_HEAD_BYTES:
                self._refuse(_too_large())
                return
        if self._head_timer is None and (self._in_head or not self._is_serving()):
            self._await_head()

    def _feed(self, data: bytes) -> None:
        """What the parent does, but for a line in the log each time: anybody can fill a log."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # nothing is upgraded to: the request is answered as any other
        except httptools.HttpParserError:
            if self._refusal is None:
                _no_http.note(self.client[0] if self.client else "a socket")
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Starts a head."""
        super().on_message_begin()
        self._in_head, self._parsed, self._received = True, 0, 0
        self._head_number += 1

    def on_url(self, url: bytes) -> None:
        """Takes a part of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Ends a head, and begins to serve."""
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answers what the parser refuses."""
        self._refuse(self._refusal or bad_request("The request is not valid HTTP."))

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refusal = _too_large()
            raise self._refusal  # ends the parsing, by `send_400_response`

    def _is_serving(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _is_over(self) -> bool:
        return self._is_refused or self.transport.is_closing()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_LIMIT_S, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_over():
            return
        if self._is_serving():  # an earlier request, meanwhile nobody reads this one
            self._await_head()
        elif self._in_head:
            message = f"The headers did not arrive within {HEAD_LIMIT_S:g} seconds."
            self._refuse(ApiError(408, message))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers, unless another answer has begun, and ends the connection."""
        self._is_refused = True
        self._stop_waiting()
        has_begun = self._is_serving() and self.cycle.response_started
        if self._is_serving():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if has_begun:
            self.transport.close()
            return
        self.transport.writelines(self._answer(error))
        # Were it closed at once, what is unread would make the client lose the answer.
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _answer(self, error: ApiError) -> list[bytes]:
        answer, default = error.response(), self.server_state.default_headers
        headers = [*default, *answer.raw_headers, (b"connection", b"close")]
        lines = [b"%b: %b\r\n" % header for header in headers]
        return [STATUS_LINE[error.status], *lines, b"\r\n", bytes(answer.body)]


def _too_large() -> ApiError:
    message = f"The headers are more than {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS}."
    return ApiError(431, message, code="headers_too_large")
