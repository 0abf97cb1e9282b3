"""Tables of characters for the C++ normalisers, from Python's `unicodedata`.

Python, and the library whose results are to be met, may know different versions of Unicode. What a
version says of a character never changes later, so only characters that one of them does not know
can differ. Those are marked as unknown, and texts with them are left to the library.
"""

import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import normalizers

Points = npt.NDArray[np.uint32]

# Characters with properties are in planes 0 and 1, or are compatibility ideographs; what
# is behind them has none, but for the variation selectors and tags of plane 14.
PLANES = range(0x20000)
IDEOGRAPHS = range(0x2F800, 0x2FA20)
# New emoji are here; all are compared with the library's reading.
PICTOGRAPHS = range(0x1F000, 0x1FB00)
_SURROGATES = range(0xD800, 0xE000)
_SYLLABLES = range(0xAC00, 0xD7A4)  # of Hangul: composed by arithmetic
# Marks whose order with another shows its combining class: of the lowest class and the highest.
_LOWEST, _HIGHEST = "\u0334", "\u0345"

# Classes of charsmap.h, beside 0 for characters that begin a cluster.
_JOINS, _CONTROL, _UNCLEAR = 1, 2, 3
# What joins the cluster before it since long, beside the combining marks below U+0800: the joiners,
# SARA AM of Thai and Lao, variation selectors, marks for symbols, halfwidth voicing marks, skin.
_JOINERS = (
    *(range(0x200C, 0x200E), range(0x0E33, 0x0E34), range(0x0EB3, 0x0EB4), range(0xFE00, 0xFE10)),
    *(range(0x20D0, 0x20F1), range(0xFF9E, 0xFFA0), range(0x1F3FB, 0x1F400)),
)
_CONTROLS = (
    *(range(0x00AD, 0x00AE), range(0x200B, 0x200C), range(0x200E, 0x2010), range(0x2028, 0x202F)),
    *(range(0x2060, 0x2065), range(0x2066, 0x2070), range(0xFEFF, 0xFF00), range(0xFFF9, 0xFFFC)),
)
# Letters that join what is behind them, or that newer versions might have do so.
_INDIC_PREFIXES = (0x0D4E, 0x111C2, 0x111C3, 0x113D1, 0x1193F, 0x11941, 0x11A3A, 0x11D46, 0x11F02,
                   *range(0x11A84, 0x11A8A))  # fmt: skip


class NfkcTables(NamedTuple):
    """`NfkcTables` of nfkc.h, with their lengths in the arrays."""

    points: Points
    classes: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]
    decomposed: Points
    pairs: Points
    unknown: Points


@lru_cache(maxsize=1)
def nfkc_tables() -> NfkcTables:
    """Return the tables; characters that the library treats otherwise are among the unknown."""
    points, classes, parts, unknown = [], [], [], list[int]()
    pairs: list[tuple[int, int, int]] = []
    for point in _assigned(unknown):
        char = chr(point)
        combining = unicodedata.combining(char)
        part = unicodedata.normalize("NFKD", char)
        part = "" if part == char else part
        if not combining and not part:
            continue
        points.append(point)
        classes.append(combining)
        parts.append(part)
        if part and unicodedata.is_normalized("NFC", char):
            canonical = unicodedata.decomposition(char).split()
            if len(canonical) == 2 and not canonical[0].startswith("<"):
                pairs.append((int(canonical[0], 16), int(canonical[1], 16), point))
    unknown += map(ord, _differing([chr(point) for point in (*points, *PICTOGRAPHS)]))
    unknown += map(ord, _not_composed([chr(point) for *_, point in pairs]))
    return NfkcTables(
        np.array(points, np.uint32),
        np.array(classes, np.uint8),
        np.array([len(part) for part in parts], np.int32),
        np.array([ord(char) for part in parts for char in part], np.uint32),
        np.array(pairs, np.uint32).reshape(-1, 3),
        np.array(unknown, np.uint32),
    )


def _assigned(unknown: list[int]) -> Iterator[int]:
    """Characters that may have properties; others that a later version may give some."""
    for points in (PLANES, IDEOGRAPHS):
        for point in points:
            if point in _SYLLABLES or point in _SURROGATES:
                continue
            if unicodedata.category(chr(point)) == "Cn" and point not in PICTOGRAPHS:
                unknown.append(point)
            else:
                yield point


def _differing(chars: list[str]) -> list[str]:
    """The characters that the library's NFKC treats otherwise than Python's."""
    library = normalizers.NFKC()
    found: set[str] = set()
    for before, after in (("", ""), ("a", _LOWEST), (f"a{_HIGHEST}", "")):
        texts = [f"{before}{char}{after}" for char in chars]
        ours = (unicodedata.normalize("NFKC", text) for text in texts)
        theirs = library.normalize_str("\n".join(texts)).split("\n")
        found |= {c for c, a, b in zip(chars, ours, theirs, strict=True) if a != b}
    return sorted(found)


def _not_composed(chars: list[str]) -> set[str]:
    """The parts of characters that the library does not compose of them."""
    parts = [unicodedata.normalize("NFD", char) for char in chars]
    theirs = normalizers.NFKC().normalize_str("\n".join(parts)).split("\n")
    ours = (unicodedata.normalize("NFKC", part) for part in parts)
    return {c for part, a, b in zip(parts, ours, theirs, strict=True) if a != b for c in part}


@lru_cache(maxsize=1)
def cluster_borders() -> Points:
    """Triples of the first and last point of a range, and their class in charsmap.h."""
    classes = np.zeros(PLANES.stop, np.uint32)
    for point in PLANES:
        category = unicodedata.category(chr(point))
        if category in ("Cc", "Zl", "Zp"):
            classes[point] = _CONTROL
        elif category in ("Mn", "Me") and point < 0x800:
            classes[point] = _JOINS
        elif category in ("Mn", "Me", "Mc", "Cf", "Cn"):
            classes[point] = _UNCLEAR
    _set(classes, _JOINERS, _JOINS)
    _set(classes, _CONTROLS, _CONTROL)
    classes[list(_INDIC_PREFIXES)] = _UNCLEAR
    starts = np.flatnonzero(np.diff(classes, prepend=0))
    ends = np.append(starts[1:], len(classes)) - 1
    borders = np.stack([starts, ends, classes[starts]], axis=1)
    kept = borders[borders[:, 2] > 0]
    return np.ascontiguousarray(np.vstack([kept, [[0xE0000, 0xE0FFF, _UNCLEAR]]]), np.uint32)


def _set(classes: Points, ranges: Iterable[range], value: int) -> None:
    for points in ranges:
        classes[points.start : points.stop] = value
