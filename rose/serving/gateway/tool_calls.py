"""Tool calls in a model's text.

The form is that of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any
number of times, between other text. A call comes as soon as it is complete. What looks like a call
but is none is text. Blank space next to a call is dropped.
"""

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call; `arguments` is the JSON of an object."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Parsed:
    """What a piece of text holds: text for the reader, and calls."""

    content: str = ""
    calls: list[FoundCall] = field(default_factory=list)


class Parser(Protocol):
    """Reads an output that comes in pieces; how it is cut makes no difference."""

    def push(self, text: str) -> Parsed:
        """Takes text, gives what is certain by now."""
        ...

    def finish(self) -> Parsed:
        """Gives the rest."""
        ...


class MarkedCalls:
    """Finds calls between marks."""

    def __init__(self) -> None:
        self._rest = ""  # text that was not given yet; within a call it starts with OPEN
        self._inside = False
        self._blank = ""  # what stood before the open mark
        self._searched = 0  # characters of the rest that hold no CLOSE
        self._after_call = False

    def push(self, text: str) -> Parsed:
        """Takes text, gives what is certain by now."""
        self._rest += text
        found = Parsed()
        while self._step(found):
            pass
        return found

    def finish(self) -> Parsed:
        """Gives the rest. A call may lack its end mark, if it is complete without."""
        found = Parsed()
        rest, self._rest = self._rest, ""
        if not self._inside:
            self._give(rest, found)
        else:
            self._close(rest.removeprefix(OPEN), rest, found)
        return found

    def _step(self, found: Parsed) -> bool:
        """Takes the next part off the rest, if it is complete; says whether it was."""
        return self._take_call(found) if self._inside else self._take_text(found)

    def _take_text(self, found: Parsed) -> bool:
        start = self._rest.find(OPEN)
        end = _certain(self._rest) if start < 0 else len(self._rest[:start].rstrip())
        self._give(self._rest[:end], found)
        if start < 0:
            self._rest = self._rest[end:]
            return False
        self._blank, self._rest = self._rest[end:start], self._rest[start:]
        self._inside, self._searched = True, 0
        return True

    def _take_call(self, found: Parsed) -> bool:
        end = self._rest.find(CLOSE, self._searched)
        if end < 0:
            self._searched = max(0, len(self._rest) - len(CLOSE))
            return False
        inner, whole = self._rest[len(OPEN) : end], self._rest[: end + len(CLOSE)]
        self._rest = self._rest[len(whole) :]
        self._close(inner, whole, found)
        return True

    def _close(self, inner: str, whole: str, found: Parsed) -> None:
        self._inside = False
        call = parse_call(inner)
        if call is None:
            self._give(self._blank + whole, found)
        else:
            found.calls.append(call)
            self._after_call = True

    def _give(self, text: str, found: Parsed) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            found.content += text


class ForcedCall:
    """Reads an output that a grammar forced to be one call."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> Parsed:
        """Takes text; nothing is certain before the end."""
        self._text += text
        return Parsed()

    def finish(self) -> Parsed:
        """Gives the call; what was cut off is text."""
        call = parse_call(self._text)
        return Parsed(self._text) if call is None else Parsed(calls=[call])


def parse_call(text: str) -> FoundCall | None:
    """The call that a JSON text describes, None if it does not."""
    try:
        found: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        return None
    return FoundCall(f"call_{secrets.token_hex(12)}", name, written)


def _certain(text: str) -> int:
    """How many characters of a text cannot belong to an open mark or the blank space before it."""
    held = next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
    return len(text[: len(text) - held].rstrip())
