"""JSON in ASCII: some clients cut a stream's lines at U+2028 and its like."""

import codecs
import re

import msgspec


def encode(body: msgspec.Struct) -> bytes:
    """The JSON of a struct."""
    return escaped(msgspec.json.encode(body))


def escaped(body: bytes) -> bytes:
    """JSON with everything beyond ASCII, which can stand in strings only, escaped."""
    return body if body.isascii() else body.decode().encode("ascii", _HANDLER)


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be").hex()
    return re.sub("....", r"\\u\g<0>", units), error.end


_HANDLER = "rose.json"
codecs.register_error(_HANDLER, _escape)
