"""From the messages of a chat request to the text that the model reads."""

import secrets
from typing import Any

import msgspec

from rose.models.card import ModelCard
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.generation_schemas import ChatRequest, ConversationMessage
from rose.serving.gateway.templates import TemplateError, normalise, render

Turn = dict[str, Any]

# What `chat_template_kwargs` cannot set: it has a field of its own, or is not the request's.
_RESERVED = frozenset(
    ("card", "messages", "template", "parts", "add_generation_prompt", "tools", "documents")
)


def turns_of(body: ChatRequest, card: ModelCard) -> list[Turn]:
    """The messages as templates expect them; see `rose.serving.gateway.templates.normalise`.

    The role `developer` becomes `system` for templates that do not speak of developers.

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


def render_turns(body: ChatRequest, turns: list[Turn], card: ModelCard) -> str:
    """The prompt of a conversation. CPU work: call it off the event loop.

    Raises:
        ApiError: 400, there is no template, or it refuses the messages.
    """
    if body.continue_final_message:
        return _render_open(body, turns, card)
    return _render(body, turns, card, body.add_generation_prompt is not False)


def _turn(message: ConversationMessage, place: str) -> Turn:
    if message.function_call:
        field = f"{place}.function_call"
        raise bad_request(f"'{field}' is not supported: use 'tool_calls'.", field)
    try:
        return normalise(msgspec.to_builtins(message), place)
    except TemplateError as error:
        raise bad_request(f"{error}.", error.field or place) from error


def _render(body: ChatRequest, turns: list[Turn], card: ModelCard, answer: bool) -> str:
    variables = _variables(body)
    template = "tool_use" if variables["tools"] else "default"
    try:
        return render(
            card.tokenizer, turns, template=template, add_generation_prompt=answer, **variables
        )
    except TemplateError as error:
        raise bad_request(f"'messages': {error}.", "messages") from error


def _render_open(body: ChatRequest, turns: list[Turn], card: ModelCard) -> str:
    """A prompt that ends within its last message, at a mark that the template is given.

    A template that trims messages also trims the mark's blank, and then the text before it.
    """
    field = "continue_final_message"
    if body.add_generation_prompt:
        raise bad_request(f"'{field}' contradicts 'add_generation_prompt'.", field)
    last = turns[-1]
    if last["role"] != "assistant":
        message = f"'{field}' needs a last message of role assistant, not {last['role']}."
        raise bad_request(message, field)
    mark = f"[end of message {secrets.token_hex(16)}]"
    marked = {**last, "content": f"{last['content']}{mark} "}
    before, found, after = _render(body, [*turns[:-1], marked], card, False).rpartition(mark)
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
