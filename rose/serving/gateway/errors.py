"""Errors of the HTTP API: one OpenAI error object for whatever went wrong."""

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import orjson
from starlette.responses import Response

from rose.serving.client_api import EngineError
from rose.serving.protocol import FailureKind

RETRY_AFTER_S = 1

_TYPES = {429: "rate_limit_error"}  # else by the hundreds of the status
_STATUS_OF_KIND: dict[FailureKind, int] = {
    "bad_request": 400,
    "overloaded": 429,
    "deadline": 504,
    "non_finite": 500,
    "internal": 500,
    "unavailable": 503,
}


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong; `param` names the request field at fault, if one is."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is not a success.

    Attributes:
        status: HTTP status.
        param: The request field at fault, such as "input[3]".
        code: A word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    def renamed(self, param: str) -> "ApiError":
        """The same error, about a field that the route calls by another name."""
        message = self.message.replace(f"'{self.param}'", f"'{param}'")
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)

    def response(self) -> Response:
        """The answer as the client sees it."""
        detail = {
            "message": self.message,
            "type": _type_of_status(self.status),
            "param": self.param,
            "code": self.code,
        }
        body = orjson.dumps({"error": detail})
        return Response(body, self.status, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A client's mistake in a field: 400."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """The server ends before the answer is there: 503."""
    return ApiError(503, "The server is shutting down.", code="unavailable")


def from_engine(error: EngineError) -> ApiError:
    """The HTTP form of a failure at the engine."""
    return ApiError(
        _STATUS_OF_KIND[error.kind], error.message, param=error.field, code=str(error.kind)
    )


_PATH = re.compile(r"^(?P<what>.*) - at `(?:key` in `)?\$\.?(?P<path>.*)`$", re.DOTALL)
_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}


def from_decoding(error: msgspec.DecodeError, struct: object = None) -> ApiError:
    """The HTTP form of a body that msgspec refuses: not JSON, or not of the right types.

    Args:
        error: What msgspec says.
        struct: The type that the body was to become.
    """
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"The body is not valid JSON: {error}.", code="invalid_json")
    found = _PATH.match(str(error))
    if found is None:
        return bad_request(f"The body has the wrong form: {_plain(str(error))}.")
    path, what = found["path"], _plain(found["what"])
    if what.startswith("invalid enum value") and (choices := _choices(struct, path)):
        what += f"; possible: {', '.join(choices)}"
    return bad_request(f"'{path}': {what}.", param=path or None)


def _choices(struct: object, field: str) -> list[str]:
    """The words that a field of a struct can have."""
    if not (isinstance(struct, type) and field in getattr(struct, "__struct_fields__", ())):
        return []
    found: list[str] = []
    types: list[Any] = [get_type_hints(struct)[field]]
    while types:
        kind = types.pop()
        if get_origin(kind) is Literal:
            found += get_args(kind)
        else:
            types += get_args(kind)
    return [f"'{word}'" for word in found]


def _plain(what: str) -> str:
    """Puts msgspec's words, which are Python's, into JSON's."""
    sentence = re.sub(r"`([^`]*)`", lambda m: _types(m[1]), what)
    return sentence[:1].lower() + sentence[1:]


def _types(names: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in names.split(" | "))


def _type_of_status(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
