"""The Jinja environment in which chat templates run.

Its settings are those for which templates are written (transformers' `apply_chat_template`): blocks
are trimmed, `break` and `continue` work, `tojson` leaves HTML characters alone, and there are
`raise_exception`, `strftime_now` and the block `generation`.

Templates come with checkpoints and read what clients send, so they run in Jinja's immutable sandbox
and on a budget. Each turn of a loop and each call of a macro looks at the clock. Text that is put
out or put together counts, and what could make much out of little is measured beforehand. So
rendering ends within a set time, and in bounded memory.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from time import thread_time
from typing import Any, TypeVar

from jinja2 import Environment, Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 2.0  # of the rendering thread on a CPU, so that a busy machine makes no difference
MAX_TEXT = 1 << 24  # characters of one text, and of what is rendered
MAX_TOTAL = 1 << 28  # characters of all texts made on the way
MAX_BITS = 1 << 8  # of an integer

MAX_INDENT = 64

# What makes a text or list as long as an argument says, and what adds as much to every line.
_SIZED = frozenset(["center", "ljust", "rjust", "zfill", "batch", "slice"])
_INDENTING = frozenset(["expandtabs", "indent", "tojson"])
# A width of six digits or more, or one that comes from an argument.
_WIDE_PERCENT = re.compile(r"%[^A-Za-z%]*(\d{6}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{6}|\{)")


T = TypeVar("T")
Value = Any  # whatever a template can hold


_REPEATABLE = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)


class BudgetError(TemplateRuntimeError):
    """A template takes too long or makes too much text."""


class _Budget:
    def __init__(self) -> None:
        self.deadline = thread_time() + SECONDS
        self.left = MAX_TOTAL
        self.turns = 0


_budget: ContextVar[_Budget] = ContextVar("budget")


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """Render a template of `make_environment` on a budget.

    Raises:
        BudgetError: it takes longer than SECONDS, or makes more text than MAX_TEXT.
        Exception: whatever the template runs into.
    """
    token = _budget.set(_Budget())
    try:
        return _bounded("".join(template.generate(variables)))
    finally:
        _budget.reset(token)


def make_environment() -> Environment:
    """Set up an environment. Threads may share it and its templates."""
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.filters = {n: _guarded(n, f) for n, f in environment.filters.items()}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _make_dict,
    }
    del environment.globals["lipsum"]
    return environment


class _Generator(CodeGenerator):
    """Counts text that is put out or put together."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made(")
        super().visit_Concat(node, frame)
        self.write(")")

    def _output_child_pre(self, *args: Value) -> None:
        self.write("environment.made(")
        super()._output_child_pre(*args)

    def _output_child_post(self, *args: Value) -> None:
        super()._output_child_post(*args)
        self.write(")")


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _generate(self, source: nodes.Template, *args: Value, **kwargs: Value) -> str:
        """Let whatever can repeat look at the clock, before code is made of a template."""
        for node in list(source.find_all(_REPEATABLE)):
            assert isinstance(node, _REPEATABLE)
            size = 1 + sum(len(text.data) for text in node.find_all(nodes.TemplateData))
            clock = nodes.EnvironmentAttribute(f"charge({size})", lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(clock, lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(clock, node.test, lineno=node.lineno)
        return super()._generate(source, *args, **kwargs)

    def charge(self, size: int) -> bool:
        """Count characters that are made; called by the code of templates."""
        budget = _budget.get(None)
        if budget is not None:  # None while a template is compiled
            budget.left -= size
            budget.turns += 1
            if budget.left < 0:
                raise BudgetError("the chat template makes too much text")
            if budget.turns % 64 == 0 and thread_time() > budget.deadline:
                raise BudgetError(f"the chat template takes longer than {SECONDS:g} seconds")
        return True

    def made(self, value: T) -> T:
        """Count what was made; called by the code of templates."""
        if isinstance(value, str | list | tuple):
            self.charge(len(_bounded(value)))
        return value

    def call_binop(self, context: Context, operator: str, left: Value, right: Value) -> Value:
        _check_operator(operator, left, right)
        return self.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Value, *args: Value, **kwargs: Value) -> Value:
        method: Value = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            _check_growth(method.__name__, subject, *args, *kwargs.values())
        return self.made(super().call(context, obj, *args, **kwargs))


class _Generation(Extension):
    """The block that marks what the model wrote; it is rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's, without the names that Python itself looks at."""

    def __init__(*args: Value, **kwargs: Value) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Value) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: no underscore may come first")


def _raise_exception(message: object) -> None:
    raise TemplateRuntimeError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_dict(*args: Value, **kwargs: Value) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Value,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # it keeps the marks that tell Jinja what to pass
    def guarded(*args: Value, **kwargs: Value) -> Value:
        if name == "join":  # an iterator would be used up by a look at it
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        _check_growth(name, *args, *kwargs.values())
        return _bounded(function(*args, **kwargs))

    return guarded


def _bounded(value: T) -> T:
    if isinstance(value, str | list | tuple) and len(value) > MAX_TEXT:
        _refuse()
    return value


def _refuse() -> None:
    raise BudgetError(f"the chat template makes more than {MAX_TEXT} characters")


def _check_operator(operator: str, left: Value, right: Value) -> None:
    """Refuse operands whose result could be far larger than they are."""
    if operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
        _refuse()
    if operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                _check_size(len(many) * times)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        _check_bits(bits * abs(right) if operator == "**" else bits + right.bit_length())


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise BudgetError("the chat template computes with numbers that are too large")


def _check_growth(name: str, *args: Value) -> None:
    """Refuse arguments of a filter or a method of str that could give far more than they are."""
    texts = [arg for arg in args if isinstance(arg, str)]
    number = max((arg for arg in args if isinstance(arg, int)), default=0)
    if name in _SIZED:
        _check_size(number)
    elif name in _INDENTING and number > MAX_INDENT:
        _refuse()
    elif name == "replace" and len(texts) >= 3:
        _check_size(texts[0].count(texts[1]) * len(texts[2]))
    elif name == "join":
        _check_join(args, sum(map(len, texts)))
    elif name == "format":
        _check_format(texts[0] if texts else "")


def _check_format(text: str) -> None:
    if _WIDE_PERCENT.search(text) or _WIDE_BRACES.search(text):
        _refuse()


def _check_join(args: tuple[Any, ...], separator: int) -> None:
    for items in args:
        if isinstance(items, list | tuple):
            text = sum(len(item) for item in items if isinstance(item, str))
            _check_size(separator * len(items) + text)


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        _refuse()
