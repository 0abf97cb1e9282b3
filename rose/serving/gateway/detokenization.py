"""Token ids to text while they come, and stop strings in that text.

However the tokens are cut into pieces, the pieces of text put together are what the tokenizer
makes of all ids at once. That rules out a window of fixed length: decoders look back (an odd byte
turns a whole run of byte tokens into U+FFFD) and drop things at the start of a text only.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import tokenizers

BYTE_FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


class TokenTable:
    """What detokenisation needs of a tokenizer, read once per model. Threads share it.

    Args:
        backend: the tokenizer; it is only read.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Read the decoder and the special tokens."""
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == ["ByteLevel"]
        self.has_byte_level = "ByteLevel" in kinds
        self.has_byte_fallback = "ByteFallback" in kinds

    def token(self, token_id: int, *, skip_special: bool = False) -> str | None:
        """The vocabulary's entry; None for what leaves no trace in a text.

        That is a special token to skip, or an id beyond the tokenizer, such as a model has whose
        vocabulary was padded.
        """
        if skip_special and token_id in self._special:
            return None
        entry: str | None = self.backend.id_to_token(token_id)
        return entry

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in the middle of a text, empty for an unknown id."""
        token = self.token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return byte_level_bytes(token)
        if self.has_byte_fallback and token in BYTE_FALLBACK:
            return bytes([BYTE_FALLBACK[token]])
        once, twice = self.decode([token_id]), self.decode([token_id, token_id])
        return twice[len(once) :].encode()

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ids that are all there."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special)
        return text


class IncrementalDetokenizer:
    """Turns the ids of one output into text as they come.

    Nothing comes of an id that only later ones can turn into text; the rest comes at once. The
    time per token does not grow with the output.
    """

    def __init__(
        self,
        table: TokenTable,
        *,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        """Start an output; with `context`, ids that it goes on from, in the middle of a text."""
        self._table = table
        self._skip = skip_special_tokens
        self._stream: _Stream = (
            _ByteStream() if table.is_byte_level else _WindowStream(table, context)
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """Take ids, give the text that is certain by now."""
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def finish(self) -> str:
        """The rest: bytes of an incomplete character come as U+FFFD. Call it once."""
        return self._stream.finish()

    def _push_one(self, token_id: int) -> str:
        token = self._table.token(token_id, skip_special=self._skip)
        return "" if token is None else self._stream.push(token_id, token)


class _Stream(Protocol):
    def push(self, token_id: int, token: str) -> str: ...

    def finish(self) -> str: ...


class _ByteStream:
    """Byte-level vocabularies: every token is bytes, the text is all of them as UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, token: str) -> str:  # noqa: ARG002
        return self._decoder.decode(byte_level_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Other vocabularies: the text grows by what the library decodes beyond a known part.

    The window holds ids of which the first `_known` are out as text. It starts with tokens that
    have text, so that what a decoder does to the start of a text is done to both alike.
    """

    def __init__(self, table: TokenTable, context: Sequence[int] = ()) -> None:
        self._table = table
        self._window = _last_words(table, context)
        self._known = len(self._window)
        self._known_text = table.decode(self._window) if self._window else ""

    def push(self, token_id: int, token: str) -> str:
        self._window.append(token_id)
        if self._table.has_byte_fallback and token in BYTE_FALLBACK:
            return ""  # a run of bytes is read when it is over
        text = self._table.decode(self._window)
        if self._table.has_byte_level and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._known_text) :]
        self._move(text)
        return new

    def finish(self) -> str:
        return self._table.decode(self._window)[len(self._known_text) :]

    def _move(self, text: str) -> None:
        """Make what is new the known part of the next window, if it has text."""
        tail = self._window[self._known :]
        tail_text = self._table.decode(tail)
        if tail_text:
            self._window, text = tail, tail_text
        self._known, self._known_text = len(self._window), text


def _last_words(table: TokenTable, ids: Sequence[int]) -> list[int]:
    """The end of what an output goes on from: as few ids as have text.

    None after a special token, where a text begins, and none after a byte, whose run may go on.
    """
    for start in range(len(ids) - 1, -1, -1):
        token = table.token(ids[start], skip_special=True)
        if token is None or (table.has_byte_fallback and token in BYTE_FALLBACK):
            return []
        if table.decode(ids[start:]):
            return list(ids[start:])
    return []


class StopStrings:
    """Finds the first stop string in a text that comes in pieces.

    The first is the one that is complete first, and of those the longest: where the text is cut
    into pieces makes no difference. Nothing is given out that may turn out to belong to a stop
    string. Each character costs constant time per stop string (Knuth, Morris and Pratt, 1977).

    Attributes:
        matched: the stop string that was found; all text after it is dropped.
    """

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        """Look for `stops`; `include` keeps the one that was found in the text."""
        self._automata = [_Automaton(stop) for stop in stops if stop]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take text, give what certainly comes before any stop string."""
        if self.matched is not None or not self._automata:
            return "" if self._automata else text
        for i, char in enumerate(text):
            found = [a.stop for a in self._automata if a.feed(char)]
            if found:
                return self._stop(self._held + text[: i + 1], max(found, key=len))
        text = self._held + text
        cut = len(text) - max(automaton.state for automaton in self._automata)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back and belongs to no stop string."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, stop: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include else text[: len(text) - len(stop)]


class _Automaton:
    """Counts in `state` how many characters of `stop` the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._shorter = _smaller_states(stop)

    def feed(self, char: str) -> bool:
        """Take a character; whether it completes the stop string."""
        self.state = self._next(self.state, char)
        return self.state == len(self.stop)

    def _next(self, state: int, char: str) -> int:
        while state and self.stop[state] != char:
            state = self._shorter[state]
        return state + 1 if self.stop[state] == char else 0


@lru_cache(maxsize=256)
def _smaller_states(stop: str) -> list[int]:
    """For each state of an automaton, the next smaller one to try; for all choices of a request."""
    found = [0] * (len(stop) + 1)
    state = 0
    for i in range(1, len(stop)):
        while state and stop[state] != stop[i]:
            state = found[state]
        state = state + 1 if stop[state] == stop[i] else 0
        found[i + 1] = state
    return found


class OutputText:
    """The text of one output: its ids decoded as they come, up to a stop string.

    Attributes:
        matched: the stop string that ended the text, None so far.
    """

    def __init__(
        self,
        table: TokenTable,
        stops: Iterable[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Start an output."""
        self._detokenizer = IncrementalDetokenizer(table, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include=include_stop)

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched

    def push(self, token_ids: Iterable[int]) -> str:
        """Take ids, give the text to send."""
        return self._stops.push(self._detokenizer.push(token_ids))

    def finish(self) -> str:
        """The rest of the text. Call it once, also after a match."""
        text = self._stops.push(self._detokenizer.finish())
        return text + self._stops.finish()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one written with other letters stands for itself."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The letters in which byte-level vocabularies write bytes (GPT-2, Radford et al., 2019).

    Bytes that print as Latin-1 stand for themselves, the others take the code points from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


_BYTE_OF = _byte_level_alphabet()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Names of the decoder's steps; empty if it has none."""
    decoder = backend.decoder
    if decoder is None:
        return []
    return _kinds(json.loads(decoder.__getstate__()))


def _kinds(decoder: dict[str, Any]) -> list[str]:
    if decoder["type"] == "Sequence":
        return [kind for step in decoder["decoders"] for kind in _kinds(step)]
    return [decoder["type"]]
