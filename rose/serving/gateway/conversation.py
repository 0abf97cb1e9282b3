"""From the messages of a chat request to the text that the model reads."""

import secrets
from collections import Counter
from typing import Any

import msgspec

from rose.models.card import ModelCard
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.generation_schemas import ChatRequest, ConversationMessage
from rose.serving.gateway.template_sandbox import BudgetError
from rose.serving.gateway.templates import TemplateError, normalise, render

Turn = dict[str, Any]

# What `chat_template_kwargs` cannot set: it has a field of its own, or is not the request's.
_RESERVED = frozenset(
    (
        "card",
        "messages",
        "template",
        "parts",
        "text_arguments",
        "null_content",
        "add_generation_prompt",
        "tools",
        "documents",
    )
)
# Forms in which some templates read messages. One that is given another form may fail, or leave
# out without a word what was said.
_OTHER_FORMS: tuple[dict[str, bool], ...] = (
    {"text_arguments": True},
    {"null_content": True},
    {"text_arguments": True, "null_content": True},
    {"parts": True},
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
    variables["template"] = "tool_use" if variables["tools"] else "default"
    variables["add_generation_prompt"] = answer
    said = _said(turns, variables["tools"] or [])
    usual = _try_form(card, turns, variables, {})
    if isinstance(usual, str) and _shows(usual, said):
        return usual
    for form in _other_forms(turns, usual):
        other = _try_form(card, turns, variables, form)
        if isinstance(other, str) and _shows(other, said):
            return other
    if isinstance(usual, TemplateError):
        raise bad_request(f"'messages': {usual}.", "messages") from usual
    return usual


def _other_forms(turns: list[Turn], usual: str | TemplateError) -> tuple[dict[str, bool], ...]:
    if isinstance(usual, TemplateError) and isinstance(usual.__cause__, BudgetError):
        return ()  # each would take as long
    calls = any("tool_calls" in turn for turn in turns)
    return _OTHER_FORMS if calls else ({"parts": True},)


def _try_form(
    card: ModelCard, turns: list[Turn], variables: dict[str, Any], form: dict[str, bool]
) -> str | TemplateError:
    try:
        return render(card.tokenizer, turns, **(variables | form))
    except TemplateError as error:
        return error


def _said(turns: list[Turn], tools: list[Any]) -> Counter[str]:
    """What a prompt is to show and how often: the user's last text, names of called functions."""
    calls = [call["function"] for turn in turns for call in turn.get("tool_calls", ())]
    names = Counter(str(function.get("name", "")) for function in calls)
    offered = Counter(str((tool.get("function") or {}).get("name", "")) for tool in tools)
    texts = [turn["content"].strip() for turn in turns if turn["role"] == "user"]
    return Counter(texts[-1:]) + Counter({name: n + offered[name] for name, n in names.items()})


def _shows(prompt: str, said: Counter[str]) -> bool:
    return all(prompt.count(text) >= times for text, times in said.items())


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
