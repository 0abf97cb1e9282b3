"""What goes before a text, and what a conversation looks like to a model."""

from typing import Any

from rose.models.card import EmbeddingCard, ModelCard, Side
from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.schemas import ChatMessage, EmbeddingRequest
from rose.serving.gateway.templates import TemplateError, render

PROMPT_FIELDS = ("prompt", "prompt_name", "input_type")

# What `input_type` values of the field's APIs stand for: names of prompts, the first that a model
# has. They are those that sentence-transformers' encode_query and encode_document look for.
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
_ROLES = {
    "query": _QUERY,
    "search_query": _QUERY,
    "document": _DOCUMENT,
    "search_document": _DOCUMENT,
    "passage": _DOCUMENT,
}


def role_of(name: str | None) -> Side | None:
    """What an `input_type`, or a prompt of such a name, says that texts are."""
    names = _ROLES.get(name or "")
    return None if names is None else "query" if names is _QUERY else "document"


def choose_prompt(body: EmbeddingRequest, card: EmbeddingCard) -> str:
    """The text that goes before each text of a request; empty: none.

    Raises:
        ApiError: 400, the model has no such prompt, or fields contradict each other.
    """
    given = [name for name in PROMPT_FIELDS if getattr(body, name) is not None]
    if len(given) > 1:
        names = " and ".join(f"'{name}'" for name in given)
        raise bad_request(f"{names} are given; send one of them.", given[-1])
    if body.prompt is not None:
        return body.prompt
    name = body.prompt_name
    if name is None and body.input_type is not None:
        name = _prompt_of_type(body.input_type, card)
    if name is None:
        name = card.default_prompt_name
    if name is None:
        return ""
    if name not in card.prompts:
        raise _unknown_prompt("prompt_name", name, card)
    return card.prompts[name]


def refuse_prompt(body: EmbeddingRequest, instead: str) -> None:
    """Refuses prompts for input that is no plain text.

    Raises:
        ApiError: 400.
    """
    for name in PROMPT_FIELDS:
        if getattr(body, name):
            raise bad_request(f"'{name}' goes with texts, not with {instead}.", name)


def render_conversation(
    body: EmbeddingRequest, messages: list[ChatMessage], card: ModelCard
) -> str:
    """The text of a conversation, by the model's chat template.

    Raises:
        ApiError: 400, there is no template, or it refuses the messages.
    """
    if not messages:
        raise bad_request("'messages' is an empty list.", "messages")
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    variables: dict[str, Any] = body.chat_template_kwargs or {}
    if clash := variables.keys() & {
        "card",
        "messages",
        "template",
        "parts",
        "add_generation_prompt",
    }:
        message = f"'chat_template_kwargs' cannot set '{min(clash)}'."
        raise bad_request(message, "chat_template_kwargs")
    answer = bool(body.add_generation_prompt)
    try:
        return render(card.tokenizer, turns, add_generation_prompt=answer, **variables)
    except TemplateError as error:
        raise bad_request(f"'messages': {error}.", "messages") from error


def _prompt_of_type(kind: str, card: EmbeddingCard) -> str | None:
    """The prompt's name for an `input_type`; a role that the model has no prompt for has none."""
    for name in (kind, *_ROLES.get(kind, ())):
        if name in card.prompts:
            return name
    if kind in _ROLES:
        return None
    raise _unknown_prompt("input_type", kind, card)


def _unknown_prompt(field: str, name: str, card: EmbeddingCard) -> ApiError:
    known = ", ".join(f"'{known}'" for known in sorted(card.prompts)) or "none"
    if field == "input_type":
        known += "; and for any model: " + ", ".join(f"'{role}'" for role in _ROLES)
    message = f"'{field}' is '{name[:100]}'; prompts of this model: {known}."
    return bad_request(message, field)


def _turn(message: ChatMessage, where: str) -> dict[str, str]:
    content = message.content if isinstance(message.content, str) else ""
    if isinstance(message.content, list):
        for i, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                text = f"'{where}.content[{i}]' is not text; only text is supported."
                raise bad_request(text, f"{where}.content[{i}]")
        content = "".join(part.text or "" for part in message.content)
    named = {"name": message.name} if message.name is not None else {}
    return {"role": message.role, "content": content, **named}
