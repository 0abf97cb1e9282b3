"""Seeded texts of characters that tokenizers stumble over."""

import random
from collections.abc import Sequence

from tools.texts import EMOJI, ODD, WORDS

MARKS = tuple(
    "\u0301\u0300\u0327\u0302\u0323\u0334\u0345\u064b\u0651\u200d\u200c\ufe0f\u20e3\u093c\u094d"
    "\u3099\u0e33\uff9e\u11a8\u1161"
)
_PIECES = (
    *("\r\n", "  ", " ", "\n", "\u2581", "\u2581\u2581", "\u00a0", "\u3000", "<s", "</s", "<unk"),
    *("\u2122", "\u00a9\u200d", "\u00ae\u0301", "\0", "\x01", "\x7f", "\uff1cs\uff1e", "\ufffd"),
    *("\u0958", "\u0675\u064e", "\u1e9b\u0323", "\uac00\u11a8", "\u2126", "\ufdfa", "\uff5e"),
)
_SPECIALS = ("<s>", "</s>", "<mask>", " <mask> ", "<unk>", "<pad>")
_WORDS = (*(word for words in WORDS.values() for word in words), *EMOJI, *ODD)
# Ranges of characters, and how often one of them is drawn.
_RANGES = (
    (0.30, 0x20, 0x7F),
    (0.10, 0x00, 0x250),
    (0.15, 0x250, 0x3400),
    (0.04, 0x3400, 0xD800),
    (0.06, 0xE000, 0x10000),
    (0.05, 0x10000, 0x20000),
    (0.01, 0x20000, 0x110000),
)


def odd_texts(count: int, seed: int = 0, specials: Sequence[str] = _SPECIALS) -> list[str]:
    """Draw texts of up to about a hundred characters, marks, words and rarely special tokens."""
    rng = random.Random(seed)
    return [
        "".join(_part(rng, specials) for _ in range(int(2 ** rng.uniform(0, 7))))
        for _ in range(count)
    ]


def _part(rng: random.Random, specials: Sequence[str]) -> str:
    drawn = rng.random()
    for share, start, stop in _RANGES:
        if drawn < share:
            return chr(rng.randrange(start, stop))
        drawn -= share
    choices = ((0.12, MARKS), (0.04, _PIECES), (0.003, specials), (1.0, _WORDS))
    for share, parts in choices:
        if drawn < share:
            return rng.choice(parts)
        drawn -= share
    raise AssertionError("the shares add up to more than one")


def every_character(step: int = 1) -> list[str]:
    """Return every character of Unicode alone, behind a letter, and with a mark behind it."""
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    chars = [chr(point) for point in points if point < 0x30000 or point >= 0xE0000][::step]
    return [text for char in chars for text in (char, f"a{char}b", f"{char}\u0301")]


def long_texts() -> list[str]:
    """Return texts of a megabyte, one of them without a space."""
    text = " ".join(_WORDS)
    spaced = (text + " ") * (1 + (1 << 20) // len(text))
    return [
        spaced,
        "".join(spaced.split()),
        "x" * (1 << 20),
        " " * (1 << 20),
        "e\u0301" * (1 << 18),
    ]
