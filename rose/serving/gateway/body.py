"""Reading a request's body: its type, its size, its time."""

import asyncio
import re

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.gateway import BodyMemory

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)
_CHARSET = re.compile(r"charset\s*=\s*\"?([\w-]+)", re.IGNORECASE)

# Smaller bodies are parsed at once: a thread would cost more than it saves.
LARGE_BYTES = 256 << 10


def check_content_type(headers: Headers) -> None:
    """Lets JSON in UTF-8 pass; a missing type counts as JSON.

    Raises:
        ApiError: 415.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415, f"Content-Encoding '{encoding[:40]}' is not supported; send plain JSON."
        )
    kind, _, parameters = headers.get("content-type", "application/json").partition(";")
    charset = _CHARSET.search(parameters)
    if not _JSON_TYPE.fullmatch(kind.strip()):
        message = f"Content-Type '{kind.strip()[:80]}' is not supported; send application/json."
        raise ApiError(415, message)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"Charset '{charset[1][:40]}' is not supported; send UTF-8.")


async def read_body(
    headers: Headers, receive: Receive, max_bytes: int, timeout_s: float, memory: BodyMemory
) -> bytes:
    """Reads the body, never holding more than `max_bytes` of it.

    Args:
        headers: Of the request.
        receive: Gives the body.
        max_bytes: Of the body.
        timeout_s: Time for the body to arrive.
        memory: Grows by each part that comes; may refuse.

    Raises:
        ApiError: 413 if it is too large, 400 if it is not as announced or does not arrive.
        ClientDisconnect: The client left.
    """
    announced = announced_length(headers)
    if announced is not None and announced > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _collect(receive, max_bytes, memory)
    except TimeoutError:
        raise bad_request(f"The body did not arrive within {timeout_s:g} seconds.") from None
    if announced is not None and announced != len(body):
        message = f"Content-Length is {announced}, but the body has {len(body)} bytes."
        raise bad_request(message)
    return body


async def _collect(receive: Receive, max_bytes: int, memory: BodyMemory) -> bytes:
    chunks: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        if memory.size + len(chunk) > max_bytes:
            raise _too_large(max_bytes)
        memory.grow(len(chunk))
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def announced_length(headers: Headers) -> int | None:
    """Content-Length; None if the body comes in chunks.

    Raises:
        ApiError: 400, it is not a number.
    """
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise bad_request("Content-Length is not a number.")
    return int(text)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", code="body_too_large")
