"""SentencePiece's normalisation `nmt_nfkc` as a precompiled map of characters, from `unicodedata`.

The format: the bytes of a double-array trie (darts-clone), as a 32-bit count and 32-bit units, and
the texts that the trie's values point into, each with a NUL behind it. All little-endian.
"""

import itertools
import struct
import unicodedata
from collections.abc import Iterator, Mapping

# What is removed, and what is a space; beside NFKC.
_REMOVED = (*range(1, 9), 0x0B, *range(0x0E, 0x20), 0x7F, 0x8F, 0x9F)
_SPACES = (0x09, 0x0A, 0x0C, 0x0D, 0x1680, *range(0x200B, 0x2010), 0x2028, 0x2029, 0x2581, 0xFEFF,
           0xFFFD)  # fmt: skip


def nmt_nfkc_rules(stop: int = 0x20000) -> dict[str, str]:
    """Return what each character, or letter with marks, becomes; characters below `stop` alone."""
    rules: dict[str, str] = {}
    for char in map(chr, range(1, stop)):
        normal = unicodedata.normalize("NFKC", char)
        if normal != char:
            rules[char] = normal
        parts = unicodedata.normalize("NFD", char)
        if parts != char and unicodedata.is_normalized("NFC", char):
            rules[parts] = char
            if len(parts) == 3:
                rules[parts[0] + parts[2]] = unicodedata.normalize("NFC", parts[0] + parts[2])
    rules |= dict.fromkeys(map(chr, _SPACES), " ") | dict.fromkeys(map(chr, _REMOVED), "")
    rules.pop("\uff5e", None)  # SentencePiece keeps it
    return {key: value for key, value in rules.items() if key != value}


def compile_charsmap(rules: Mapping[str, str]) -> bytes:
    """Return the blob of a map.

    Args:
        rules: Keys without NUL, not empty, and what takes their places.
    """
    texts, places = b"", {}
    for value in sorted(set(rules.values())):
        places[value] = len(texts)
        texts += value.encode() + b"\0"
    units = _Trie({key.encode(): places[value] for key, value in rules.items()}).units
    return struct.pack(f"<{len(units) + 1}I", 4 * len(units), *units) + texts


class _Trie:
    """A double array: a node's children are at its base ^ label, its value at the base itself."""

    def __init__(self, values: Mapping[bytes, int]) -> None:
        self.units = [0] * 256
        self._free = set(range(1, 256))
        self._bases: set[int] = set()
        self._add(0, 0, sorted(values.items()))

    def _add(self, node: int, depth: int, entries: list[tuple[bytes, int]]) -> None:
        """Put what is below a node; its unit has its label already."""
        groups = {
            label: list(group)
            for label, group in itertools.groupby(
                entries, lambda entry: entry[0][depth] if len(entry[0]) > depth else 0
            )
        }
        base = self._place(list(groups))
        self.units[node] |= (node ^ base) << 10 | (256 if 0 in groups else 0)
        for label, group in groups.items():
            self.units[base ^ label] = label if label else group[0][1] | 1 << 31
        for label, group in groups.items():
            if label:
                self._add(base ^ label, depth + 1, group)

    def _place(self, labels: list[int]) -> int:
        for base in self._candidates(labels[0]):
            if base not in self._bases and all(base ^ label in self._free for label in labels):
                self._bases.add(base)
                self._free -= {base ^ label for label in labels}
                return base
        raise AssertionError("a new block has room for every node")

    def _candidates(self, label: int) -> Iterator[int]:
        for place in itertools.islice(sorted(self._free)[-300:], 300):
            yield place ^ label
        start = len(self.units)
        self.units += [0] * 256
        self._free |= set(range(start, start + 256))
        yield start
