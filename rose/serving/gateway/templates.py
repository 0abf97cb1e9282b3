"""Chat templates: messages to the text of a prompt, as transformers' `apply_chat_template` does it.

Rendering is work for the CPU: call it off the event loop. It ends within seconds whatever the
template does (`template_sandbox`). The text is to be tokenised without adding special tokens.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

import jinja2
import msgspec

from rose.models.card import TokenizerCard
from rose.serving.gateway import template_sandbox
from rose.serving.gateway.errors import ApiError
from rose.serving.gateway.json_guard import decode

Message = Mapping[str, Any]

_ARGUMENTS = msgspec.json.Decoder(dict[str, Any])

# Names under which a message carries its reasoning; templates read the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateError(ValueError):
    """There is no template, or it refuses the messages, or it cannot be rendered.

    Attributes:
        field: The part of the messages that is malformed, such as "messages[0].content[1].text";
            None: it is not just one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message if field is None else f"{field}: {message}")
        self.field = field


def render(
    card: TokenizerCard,
    messages: Iterable[Message],
    *,
    template: str = "default",
    add_generation_prompt: bool = False,
    parts: bool = False,
    text_arguments: bool = False,
    null_content: bool = False,
    **variables: object,
) -> str:
    """Render a conversation.

    Args:
        card: facts of the tokenizer: templates by name, special tokens.
        messages: role, content, tool_calls and whatever else the template reads, as decoded from
            JSON. They may have no content, content in parts, and arguments in a string.
        template: name of the template; "default" where the model has none of that name.
        add_generation_prompt: end with the start of an answer.
        parts: the template wants the content of a message as a list of parts.
        text_arguments: it wants the arguments of tool calls as JSON in a text.
        null_content: it wants null where a message calls tools and has no content.
        variables: what else the template may read, such as `tools`; they win over the names of
            special tokens.

    Raises:
        TemplateError: with the template's own words where it has some.
    """
    turns = [normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if text_arguments or null_content:
        turns = [_other_calls(m, text_arguments, null_content) for m in turns]
    if parts:
        turns = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in turns]
    names = {
        **card.special_tokens,
        "tools": None,
        "documents": None,
        **variables,
        "messages": turns,
        "add_generation_prompt": add_generation_prompt,
    }
    source = _source(card, template)
    try:
        return template_sandbox.render(_compiled(source), names)
    except jinja2.TemplateSyntaxError as error:
        raise _failure(f"line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:  # a refusal, or something undefined
        raise _failure(error.message or type(error).__name__) from error
    except Exception as error:  # a template can run into any
        raise _failure(f"{type(error).__name__}: {error}") from error


def _source(card: TokenizerCard, template: str) -> str:
    source = card.chat_templates.get(template) or card.chat_templates.get("default")
    if source is not None:
        return source
    if not card.chat_templates:
        raise TemplateError("the model has no chat template")
    names = ", ".join(sorted(card.chat_templates))
    raise TemplateError(f"the model has no default chat template, only: {names}")


def _failure(message: str) -> TemplateError:
    return TemplateError(f"the chat template fails: {message}")


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@cache
def _environment() -> jinja2.Environment:
    return template_sandbox.make_environment()


def normalise(message: Message, place: str = "message") -> dict[str, Any]:
    """Bring a message into the form that templates expect.

    Keys that are null are left out, but `content` is always a text: without it some templates
    print "None" and others fail. So is an empty list of tool calls, which many clients send and
    some templates refuse. Arguments of tool calls are mappings.

    Args:
        message: left as it is.
        place: what errors call it.

    Raises:
        TemplateError: a part of it is malformed or no text; the message names the field.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _content(kept.get("content", ""), f"{place}.content")
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
    else:
        calls = enumerate(kept["tool_calls"])
        kept["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{i}]") for i, call in calls]
    reasoning = next((kept[key] for key in _REASONING if key in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _other_calls(turn: dict[str, Any], text_arguments: bool, null_content: bool) -> dict[str, Any]:
    """A message that calls tools in the form of older templates."""
    if not turn.get("tool_calls"):
        return turn
    changed = {**turn, "content": (turn["content"] or None) if null_content else turn["content"]}
    if text_arguments:
        changed["tool_calls"] = [_text_arguments(call) for call in turn["tool_calls"]]
    return changed


def _text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _content(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError("a string or a list of text parts is expected", place)
    return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        raise TemplateError(f"only text parts are supported, found {kind!r}", f"{place}.type")
    if not isinstance(part.get("text"), str):
        raise TemplateError("a string is expected", f"{place}.text")
    return str(part["text"])


def _tool_call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise TemplateError("an object is expected", f"{place}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments, f"{place}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _arguments(text: str, place: str) -> dict[str, Any]:
    """Arguments as a mapping; clients send them as JSON in a string, as strict as a body."""
    try:
        return decode(text.encode() or b"{}", _ARGUMENTS)
    except UnicodeEncodeError:
        reason = "It holds half of a surrogate pair."
    except ApiError as error:
        reason = error.message.replace("The body", "It")
    raise TemplateError(f"a JSON object in a string is expected. {reason.rstrip('.')}", place)
