"""/openapi.json, made from the operations and their structs, so that it cannot drift."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rose._version import __version__
from rose.serving.gateway.errors import ErrorAnswer
from rose.serving.gateway.operation import Operation

_REF = "#/components/schemas/{name}"
_STATUS_TEXT = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid key.",
    404: "No such model.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "A fault of the server.",
    503: "Not ready.",
    504: "No answer in time.",
}


def openapi(operations: Sequence[Operation], guarded: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document.

    Args:
        operations: All routes.
        guarded: Whether the server asks for a key.
    """
    schemas, components = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        for path in (operation.path, *operation.aliases):
            entry = _entry(operation, path, schemas, guarded)
            paths.setdefault(_plain(path), {})[operation.method.lower()] = entry
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "ROSE",
            "version": __version__,
            "description": "LLMs, embedders and rerankers from one server.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if guarded:
        scheme = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"key": scheme}
    return document


def _schemas(operations: Iterable[Operation]) -> tuple[dict[Any, Any], dict[str, Any]]:
    types: list[Any] = [ErrorAnswer]
    for operation in operations:
        types += [operation.body] if operation.body is not None else []
        types += [operation.answer] if not isinstance(operation.answer, str) else []
    unique = list(dict.fromkeys(types))
    found, components = msgspec.json.schema_components(unique, ref_template=_REF)
    return dict(zip(unique, found, strict=True)), components


def _entry(
    operation: Operation, path: str, schemas: dict[Any, Any], guarded: bool
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "operationId": _operation_id(operation, path),
        "summary": operation.summary,
        "description": operation.description,
        "tags": [operation.tag],
        "responses": _responses(operation, schemas, guarded),
    }
    if path != operation.path:
        entry["description"] = f"The same as `{_plain(operation.path)}`."
        entry["x-alias-of"] = _plain(operation.path)
    if parameters := _parameters(path):
        entry["parameters"] = parameters
    if operation.body is not None:
        content: dict[str, Any] = {"schema": schemas[operation.body]}
        if operation.example:
            content["example"] = operation.example
        entry["requestBody"] = {"required": True, "content": {"application/json": content}}
    if guarded and operation.guarded:
        entry["security"] = [{"key": []}]
    return entry


def _responses(
    operation: Operation, schemas: dict[Any, Any], guarded: bool
) -> dict[str, dict[str, Any]]:
    answer = operation.answer
    content = (
        {answer: {"schema": {"type": "object" if answer.endswith("json") else "string"}}}
        if isinstance(answer, str)
        else {"application/json": {"schema": schemas[answer]}}
    )
    responses: dict[str, dict[str, Any]] = {"200": {"description": "Done.", "content": content}}
    asked = {401} if guarded and operation.guarded else set()
    for status in sorted({*operation.statuses, *asked}):
        responses[str(status)] = {
            "description": _STATUS_TEXT[status],
            "content": {"application/json": {"schema": schemas[ErrorAnswer]}},
        }
    return responses


def _parameters(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)(?::\w+)?}", path)
    schema = {"type": "string"}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _plain(path: str) -> str:
    """A path without Starlette's convertors."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)


def _operation_id(operation: Operation, path: str) -> str:
    words = re.findall(r"\w+", _plain(path))
    return "_".join([operation.method.lower(), *words])
