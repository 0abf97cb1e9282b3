"""Tools of a chat request: what is offered to the model, and what it has to call."""

import json
from typing import Any, NamedTuple

from rose.models.card import ModelCard
from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.generation_schemas import ChatRequest
from rose.serving.gateway.tool_calls import ForcedCall, MarkedCalls, Parser

MAX_TOOLS = 512

# Where a schema keeps what it refers to, as "#/$defs/NAME".
_DEFINITIONS = ("$defs", "definitions")


def offers_tools(body: ChatRequest) -> bool:
    """Whether the model may call tools."""
    return bool(body.tools) and body.tool_choice != "none"


def parser_of(body: ChatRequest) -> Parser | None:
    """What reads calls out of one choice; None: the model may make none."""
    if not offers_tools(body):
        return None
    return MarkedCalls() if body.tool_choice in (None, "auto") else ForcedCall()


class ForcedSchema(NamedTuple):
    """The JSON schema, as text, of a call that the model has to make."""

    schema: str
    field: str  # where the request has what may be wrong with it


def forced_call(body: ChatRequest, card: ModelCard) -> ForcedSchema | None:
    """Checks the tools; the schema of the call that the model has to make, if it has to.

    Raises:
        ApiError: 400, naming the field.
    """
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"'tools' has {len(tools)} items; at most {MAX_TOOLS}.", "tools")
    functions = [_function_of(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    wanted = _wanted(body, functions)
    if not offers_tools(body):
        return None
    _check_model(card)
    if body.response_format is not None and body.response_format.type != "text":
        message = "'response_format' leaves no room for 'tools'; send 'tool_choice': 'none'."
        raise bad_request(message, "response_format")
    if wanted is None:
        return None
    if card.generation is None or not card.generation.structured_output:
        message = "'tool_choice': this model can only do 'auto' and 'none'."
        raise bad_request(message, "tool_choice")
    field = "tools"
    if len(wanted) == 1:
        field = f"tools[{functions.index(wanted[0])}].function.parameters"
    return ForcedSchema(json.dumps(_schema_of(wanted), ensure_ascii=False), field)


def _wanted(body: ChatRequest, functions: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The functions of which one has to be called, None if none has to."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if not functions:
        raise bad_request("'tool_choice' needs 'tools'.", "tool_choice")
    if choice == "required":
        return functions
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    found = [function for function in functions if function["name"] == name]
    if not found:
        known = ", ".join(f"'{function['name'][:100]}'" for function in functions[:20])
        message = f"'tool_choice' must be a word or name one of the functions: {known}."
        raise bad_request(message, "tool_choice")
    return found[:1]


def _check_model(card: ModelCard) -> None:
    """Refuses tools that the model would never see."""
    templates = card.tokenizer.chat_templates
    source = templates.get("tool_use") or templates.get("default")
    if source is not None and "tools" not in source:
        message = "'tools': the model's chat template has no place for them."
        raise bad_request(message, "tools")


def _function_of(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise bad_request(f"'{place}.type': only 'function' is supported.", f"{place}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _malformed(f"{place}.function", "an object")
    name = function.get("name")
    if not (isinstance(name, str) and name):
        raise _malformed(f"{place}.function.name", "a text that is not empty")
    if not isinstance(function.get("parameters"), dict | None):
        raise _malformed(f"{place}.function.parameters", "an object")
    return function


def _malformed(field: str, expected: str) -> ApiError:
    return bad_request(f"'{field}' must be {expected}.", field)


def _schema_of(functions: list[dict[str, Any]]) -> dict[str, Any]:
    """A call of one of the functions. What their parameters refer to moves to the top."""
    top: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for function in functions:
        parameters = _object(function.get("parameters") or {})
        for kind in _DEFINITIONS:
            _merge(top, kind, parameters.pop(kind, {}))
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {**top, **calls[0]} if len(calls) == 1 else {**top, "anyOf": calls}


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of arguments, which are an object even where it does not say so."""
    says = {"type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf"} & schema.keys()
    return dict(schema) if says else {"type": "object", **schema}


def _merge(top: dict[str, Any], kind: str, definitions: object) -> None:
    if not definitions:
        return
    known = top.setdefault(kind, {})
    for name, definition in definitions.items() if isinstance(definitions, dict) else ():
        if known.setdefault(name, definition) != definition:
            message = f"'tools': two functions define '{name[:100]}' under '{kind}' differently."
            raise bad_request(message, "tools")
