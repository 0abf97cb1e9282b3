"""JSON bodies: refuses what a lenient parser lets through, before anything is built from it.

msgspec refuses NaN and lone surrogates. It keeps the last of two equal keys, skips invalid UTF-8
and numbers out of range in fields that nobody reads, and recurses; those are checked here, in a few
passes at memory speed, so that a body of many megabytes costs little.
"""

import re
from contextlib import suppress
from math import isinf
from typing import TypeVar

import msgspec

from rose.serving.gateway.errors import bad_request, from_decoding

MAX_DEPTH = 64
MAX_STRINGS = 500_000

_OPEN, _CLOSE = frozenset(b"[{"), frozenset(b"]}")
_NOT_BRACKETS = bytes(set(range(256)) - _OPEN - _CLOSE)
_EXPONENT = re.compile(rb"[eE]\+?[0-9]{3,}")  # the largest number is 1.8e308
_MANTISSA_DIGITS = 400
_SEPARATORS = frozenset((b",", b", ", b""))

T = TypeVar("T")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Parses a request body strictly.

    Raises:
        ApiError: 400, naming the field where there is one.
    """
    check_structure(body)
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise from_decoding(error, decoder.type) from None
    except RecursionError:  # cannot happen below MAX_DEPTH, unless the stack is deep already
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None


def check_structure(body: bytes) -> None:
    """Checks depth, duplicate keys and UTF-8 of a body that may not be JSON at all.

    Raises:
        ApiError: 400. Other faults of the JSON are left to the parser.
    """
    if not body.isascii():
        _check_utf8(body)
    if body.count(b'"') > 2 * MAX_STRINGS:
        raise bad_request(f"The body holds more than {MAX_STRINGS} strings.", code="invalid_json")
    plain = body
    if b"\\" in body:  # same length, so offsets stay; what is odd is outside strings or a quote
        plain = body.replace(rb"\\", b"__").replace(rb"\"", b"__")
    _Walk(body).over(plain.split(b'"'))


class _Walk:
    """One pass over a body that is cut at its quotes: every second part is a string's inside."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.scopes: list[set[str | bytes]] = [set()]

    def over(self, parts: list[bytes]) -> None:
        offset, previous = 0, 0
        for index, part in enumerate(parts):
            if not index & 1 and part not in _SEPARATORS:
                if index and part.lstrip()[:1] == b":":
                    self._key(self.body[previous : offset - 1])
                self._brackets(part.translate(None, _NOT_BRACKETS))
                if b"e" in part or b"E" in part:
                    _check_numbers(part)
            previous = offset
            offset += len(part) + 1

    def _key(self, raw: bytes) -> None:
        key: str | bytes = raw
        if b"\\" in raw:
            key = _unescaped(raw)
        if key in self.scopes[-1]:
            name = raw.decode(errors="replace")[:100]
            raise bad_request(f"The key '{name}' appears twice.", param=name, code="invalid_json")
        self.scopes[-1].add(key)

    def _brackets(self, brackets: bytes) -> None:
        scopes = self.scopes
        for bracket in brackets:
            if bracket in _OPEN:
                scopes.append(set())
                if len(scopes) > MAX_DEPTH + 1:
                    message = f"The body is nested deeper than {MAX_DEPTH} levels."
                    raise bad_request(message, code="invalid_json")
            elif len(scopes) > 1:
                scopes.pop()


def _check_numbers(part: bytes) -> None:
    """Refuses what is out of range; the parser looks only at the numbers that it keeps."""
    for found in _EXPONENT.finditer(part):
        before = part[max(0, found.start() - _MANTISSA_DIGITS) : found.start()]
        number = before[len(before.rstrip(b"0123456789.")) :] + found[0]
        with suppress(ValueError):  # no number: left to the parser
            if isinf(float(number)):
                raise bad_request("A number is out of range.", code="invalid_json")


def _unescaped(raw: bytes) -> bytes:
    """A key without escapes, as the parser will read it."""
    try:
        return msgspec.json.decode(b'"' + raw + b'"', type=str).encode()
    except msgspec.DecodeError as error:
        raise from_decoding(error) from None


def _check_utf8(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        message = f"The body is not valid UTF-8 (byte {error.start})."
        raise bad_request(message, code="invalid_json") from None
