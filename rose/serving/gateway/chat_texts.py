"""Texts that reach a model as conversations: an embedder or ranker that is made of a chat model."""

from collections.abc import Callable
from typing import Any

from rose.models.card import ChatTexts, TokenizerCard
from rose.serving.gateway.templates import render
from rose.serving.gateway.tokenization import Tokenizer

# Two contents that differ in their first and last token, whatever the tokenizer.
_FILLERS = ("1", "2 1 3")


def render_text(card: TokenizerCard, chat: ChatTexts, text: str, prompt: str = "") -> str:
    """The conversation of one text: a message of the user, after the prompt as the system's.

    Raises:
        TemplateError: the template refuses it.
    """
    return _render(card, chat, [("user", text)], prompt)


def render_pair(
    card: TokenizerCard, chat: ChatTexts, query: str, document: str, prompt: str = ""
) -> str:
    """The conversation of a pair: a message of the role "query" and one of "document".

    Raises:
        TemplateError: the template refuses it.
    """
    return _render(card, chat, [("query", query), ("document", document)], prompt)


def _render(card: TokenizerCard, chat: ChatTexts, turns: list[tuple[str, str]], prompt: str) -> str:
    system = [("system", prompt)] if prompt else []
    messages = [{"role": role, "content": text} for role, text in (*system, *turns)]
    variables: dict[str, Any] = {"add_generation_prompt": False, **chat.variables}
    return render(card, messages, parts=chat.parts, **variables)


def template_edges(tokenizer: Tokenizer, render_filler: Callable[[str], str]) -> tuple[int, int]:
    """How many tokens the template puts before and after a text, whatever the text is.

    Args:
        tokenizer: the model's.
        render_filler: renders a text.

    Raises:
        TemplateError: the template refuses a text.
    """
    rendered = [render_filler(filler) for filler in _FILLERS]
    first, second = (ids.tolist() for ids in tokenizer.encode(rendered, add_special_tokens=False))
    head, tail = _common(first, second), _common(first[::-1], second[::-1])
    # Where the text is no part of the conversation, nothing says what may be cut.
    return (head, tail) if head + tail < min(len(first), len(second)) else (0, 0)


def _common(a: list[int], b: list[int]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
