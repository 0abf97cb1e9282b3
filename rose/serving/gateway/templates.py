"""Chat templates: Jinja out of a checkpoint, in a sandbox, with bounds on its time and output."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rose.models.card import TokenizerCard

MAX_CHARS = 64 << 20
MAX_SECONDS = 10.0
MAX_RANGE_ITEMS = 1_000_000
MAX_FACTOR_SUM = 10_000
MAX_EXPONENT_SUM = 1_000


class TemplateError(ValueError):
    """The template refuses the messages, or cannot be rendered."""


def render(
    card: TokenizerCard,
    messages: Iterable[Mapping[str, Any]],
    *,
    template: str = "default",
    add_generation_prompt: bool = False,
    **variables: object,
) -> str:
    """The prompt of a conversation, as `apply_chat_template` makes it.

    Raises:
        TemplateError: With the template's own words where it has some.
    """
    source = card.chat_templates.get(template) or card.chat_templates.get("default")
    if source is None:
        raise TemplateError("the model has no chat template")
    names = {
        **card.special_tokens,
        "tools": None,
        "documents": None,
        **variables,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "range": _Budget().range,
    }
    try:
        return _joined(_compiled(source).generate(names))
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise TemplateError(f"the chat template fails: {error}") from error
    except (AttributeError, RecursionError, MemoryError) as error:
        raise TemplateError(f"the chat template fails: {type(error).__name__}") from error


def _joined(pieces: Iterator[str]) -> str:
    parts: list[str] = []
    size, end = 0, time.monotonic() + MAX_SECONDS
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > MAX_CHARS or time.monotonic() > end:
            raise TemplateError("it writes too much or takes too long")
    return "".join(parts)


class _Budget:
    """Jinja's `range`, with a limit on all items of one rendering together."""

    def __init__(self) -> None:
        self.left = MAX_RANGE_ITEMS

    def range(self, *args: int) -> range:
        items = range(*args)
        self.left -= len(items)
        if self.left < 0:
            raise TemplateError("it loops too long")
        return items


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> "_Environment":
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which products stay small: `'a' * 10 ** 10` would take all memory."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        size = sum(len(x) if isinstance(x, Sized) else abs(int(x)) for x in (left, right))
        if operator == "**" and size > MAX_EXPONENT_SUM:
            raise TemplateError("it computes a number that is too large")
        if any(isinstance(x, Sized) for x in (left, right)) and size > MAX_FACTOR_SUM:
            raise TemplateError("it repeats a text too often")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}`, which marks answers for training and means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
