"""From the messages of a chat request to the text that the model reads."""

import secrets
from typing import Any

import msgspec

from rose.models.card import ModelCard
from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.generation_schemas import ChatRequest, ConversationMessage, FunctionCall
from rose.serving.gateway.templates import TemplateError, render

# What `chat_template_kwargs` cannot set: it has a field of its own, or is not the request's.
_RESERVED = frozenset(
    ("card", "messages", "template", "add_generation_prompt", "tools", "documents")
)


def render_chat(body: ChatRequest, card: ModelCard) -> str:
    """The prompt of a conversation. CPU work: call it off the event loop.

    Raises:
        ApiError: 400, the messages are malformed, there is no template, or it refuses them.
    """
    turns = turns_of(body, card)
    if not body.continue_final_message:
        return _render(body, card, turns, body.add_generation_prompt is not False)
    return _render_open(body, card, turns)


def turns_of(body: ChatRequest, card: ModelCard) -> list[dict[str, Any]]:
    """The messages as templates expect them.

    Content is always a text: null is an empty one. Arguments of tool calls are objects. The role
    `developer` becomes `system` for templates that do not speak of developers.

    Raises:
        ApiError: 400, naming the message.
    """
    if not body.messages:
        what = "missing" if body.messages is None else "an empty list"
        raise bad_request(f"'messages' is {what}.", "messages")
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    if not any("developer" in source for source in card.tokenizer.chat_templates.values()):
        for turn in turns:
            if turn["role"] == "developer":
                turn["role"] = "system"
    return turns


def _render(body: ChatRequest, card: ModelCard, turns: list[dict[str, Any]], answer: bool) -> str:
    variables = _variables(body)
    template = "tool_use" if variables["tools"] else "default"
    try:
        return render(
            card.tokenizer, turns, template=template, add_generation_prompt=answer, **variables
        )
    except TemplateError as error:
        raise bad_request(f"'messages': {error}.", "messages") from error


def _render_open(body: ChatRequest, card: ModelCard, turns: list[dict[str, Any]]) -> str:
    """A prompt that ends within its last message, at a mark that the template is given.

    A template that trims messages also trims the mark's blank, and then the text before it.
    """
    field = "continue_final_message"
    if body.add_generation_prompt:
        raise bad_request(f"'{field}' contradicts 'add_generation_prompt'.", field)
    if turns[-1]["role"] != "assistant":
        message = f"'{field}' needs a last message of role assistant, not {turns[-1]['role']}."
        raise bad_request(message, field)
    mark = f"[end of message {secrets.token_hex(16)}]"
    turns[-1]["content"] += mark + " "
    text = _render(body, card, turns, answer=False)
    before, found, after = text.rpartition(mark)
    if not found:
        message = f"'{field}': the chat template does not show the last message."
        raise bad_request(message, field)
    return before if after.startswith(" ") else before.rstrip()


def _variables(body: ChatRequest) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    if clash := given.keys() & _RESERVED:
        message = f"'chat_template_kwargs' cannot set '{min(clash)}'."
        raise bad_request(message, "chat_template_kwargs")
    fields: dict[str, Any] = {
        "tools": (body.tools or None) if body.tool_choice != "none" else None,
        "documents": body.documents,
    }
    if body.reasoning_effort is not None:
        fields["reasoning_effort"] = body.reasoning_effort
    return fields | given


def _turn(message: ConversationMessage, where: str) -> dict[str, Any]:
    if message.function_call:
        field = f"{where}.function_call"
        raise bad_request(f"'{field}' is not supported: use 'tool_calls'.", field)
    turn: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                **({"id": call.id} if call.id is not None else {}),
                "type": "function",
                "function": _function(call.function, f"{where}.tool_calls[{i}]"),
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return turn


def _content(message: ConversationMessage, where: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for i, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            field = f"{where}.content[{i}]"
            raise bad_request(f"'{field}' is not text; only text is supported.", field)
    return "".join(part.text or "" for part in message.content)


def _function(function: FunctionCall, where: str) -> dict[str, Any]:
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}.function.arguments")
    return {"name": function.name, "arguments": arguments}


def _parsed(arguments: str, field: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise _no_object(field) from None


def _no_object(field: str) -> ApiError:
    return bad_request(f"'{field}' is not the JSON of an object.", field)
