"""Reading a request's body: its type, its size, its time."""

import asyncio
import re
from collections.abc import Callable

from starlette.requests import Request

from rose.serving.gateway.errors import ApiError, bad_request

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)


# Smaller bodies are parsed at once: a thread would cost more than it saves.
LARGE_BYTES = 256 << 10


def check_content_type(request: Request) -> None:
    """Lets JSON in UTF-8 pass; a missing type counts as JSON.

    Raises:
        ApiError: 415.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415, f"Content-Encoding '{encoding[:40]}' is not supported; send plain JSON."
        )
    kind, _, parameters = request.headers.get("content-type", "application/json").partition(";")
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters, re.IGNORECASE)
    if not _JSON_TYPE.fullmatch(kind.strip()):
        message = f"Content-Type '{kind.strip()[:80]}' is not supported; send application/json."
        raise ApiError(415, message)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"Charset '{charset[1][:40]}' is not supported; send UTF-8.")


async def read_body(
    request: Request, max_bytes: int, timeout_s: float, grow: Callable[[int], None]
) -> bytes:
    """Reads the body, never holding more than `max_bytes` of it.

    Args:
        request: Whose body it is.
        max_bytes: Of the body.
        timeout_s: Time for the body to arrive.
        grow: Is told how many bytes have come, for each part that comes; may refuse.

    Raises:
        ApiError: 413 if it is too large, 400 if it is not as announced or does not arrive.
        ClientDisconnect: The client left.
    """
    announced = announced_length(request)
    if announced is not None and announced > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _collect(request, max_bytes, grow)
    except TimeoutError:
        raise bad_request(f"The body did not arrive within {timeout_s:g} seconds.") from None
    if announced is not None and announced != len(body):
        message = f"Content-Length is {announced}, but the body has {len(body)} bytes."
        raise bad_request(message)
    return body


async def _collect(request: Request, max_bytes: int, grow: Callable[[int], None]) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        grow(len(chunk))
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def announced_length(request: Request) -> int | None:
    """Content-Length; None if the body comes in chunks.

    Raises:
        ApiError: 400, it is not a number.
    """
    text = request.headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise bad_request("Content-Length is not a number.")
    return int(text)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", code="body_too_large")
