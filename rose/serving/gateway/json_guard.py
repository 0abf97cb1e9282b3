"""JSON bodies: refuses what a lenient parser lets through, before anything is built from it.

msgspec refuses NaN and lone surrogates. It keeps the last of two equal keys, skips invalid UTF-8
and numbers out of range in fields that nobody reads, and recurses; those are checked here, in a few
passes at memory speed, so that a body of many megabytes costs little.
"""

import re
from contextlib import suppress
from math import isinf
from typing import Any, TypeVar, cast

import msgspec

from rose.serving.gateway.errors import bad_request, from_decoding

MAX_DEPTH = 64
MAX_STRINGS = 500_000

_OPEN, _CLOSE = frozenset(b"[{"), frozenset(b"]}")
_NOT_BRACKETS = bytes(set(range(256)) - _OPEN - _CLOSE)
_EXPONENT = re.compile(rb"[eE]\+?[0-9]{3,}")  # the largest number is 1.8e308
_MANTISSA_DIGITS = 400
_FLOAT = re.compile(r"^Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$\.(\w+)")
_EXACT = 2**53  # a float below is exactly the integer that was meant
_SEPARATORS = frozenset((b",", b", ", b""))

T = TypeVar("T")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Parses a request body strictly. A number such as 6.0 is an integer, as JSON Schema has it.

    Raises:
        ApiError: 400, naming the field where there is one.
    """
    check_structure(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if _field_of_float(error) is not None:
            return _decode_floats(body, decoder)
        raise from_decoding(error, decoder.type) from None
    except msgspec.DecodeError as error:
        raise from_decoding(error, decoder.type) from None
    except RecursionError:  # cannot happen below MAX_DEPTH, unless the stack is deep already
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None


def _decode_floats(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Parses a body with a float where an integer belongs; those that are whole become integers.

    Only fields that msgspec complains of are changed, with all that is in them: in the others 1.0
    stays what it is.
    """
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:  # in a field that nobody reads
        raise from_decoding(error, decoder.type) from None
    changed: set[str | None] = set()
    while True:
        try:
            return cast("T", msgspec.convert(value, decoder.type, str_keys=True))
        except msgspec.ValidationError as error:
            field = _field_of_float(error)
            if field is None or field in changed:
                raise from_decoding(error, decoder.type) from None
            value[field] = _with_integers(value[field])
            changed.add(field)


def _field_of_float(error: msgspec.ValidationError) -> str | None:
    """The field of the body where there is a float that should be something else."""
    found = _FLOAT.search(str(error))
    return found and found[1]


def _with_integers(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    return value


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
