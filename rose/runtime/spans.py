"""Parts of texts that are pooled one by one: chunks of a document.

Plain numpy. Shape letters: B texts, S spans of all texts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of some texts: `counts` int32 [B] per text, `bounds` int32 [S, 2].

    A span's bounds are its first token and the one after its last, counted within its text. The
    spans of a text are in order and do not overlap; tokens may lie between them.
    """

    counts: IntArray
    bounds: IntArray

    @classmethod
    def join(cls, parts: "Sequence[Spans]") -> "Spans":
        """Join the spans of several groups of texts."""
        counts = np.concatenate([part.counts for part in parts])
        bounds = np.concatenate([part.bounds for part in parts])
        return cls(counts, bounds)

    def part(self, first: int, last: int) -> "Spans":
        """Return the spans of texts `first` to `last` - 1."""
        starts = first_rows(self.counts)
        bounds = self.bounds[starts[first] : starts[last]]
        return Spans(self.counts[first:last], bounds)

    def take(self, order: npt.NDArray[np.int64]) -> "Spans":
        """Return the spans of the texts in another order."""
        bounds = self.bounds[gather(self.counts, order)]
        return Spans(self.counts[order], bounds)

    def check(self, lengths: IntArray) -> None:
        """Check spans against the tokens per text, int32 [B].

        Raises:
            ValueError: they are empty, overlap, are out of order or out of their text.
        """
        if len(self.counts) != len(lengths) or self.counts.min(initial=1) < 1:
            raise ValueError("each text needs at least one span")
        if self.bounds.shape != (self.counts.sum(dtype=np.int64), 2):
            raise ValueError("spans have to be pairs, as many as are counted")
        ends = np.roll(self.bounds[:, 1], 1)
        ends[first_rows(self.counts)[:-1]] = 0  # what each span has to come after
        limits = np.repeat(lengths, self.counts)
        starts, stops = self.bounds.T
        if (starts < ends).any() or (stops <= starts).any() or (stops > limits).any():
            raise ValueError("spans have to be in order, within their text, and not empty")

    def segments(self, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """Turn spans of packed texts into the segments that pooling knows.

        Args:
            lengths: tokens per text, int32 [B].

        Returns:
            `cu_seqlens` int32 [S + 1], where each segment ends with its span, and `starts`
            int32 [S], the tokens of the segment before the span. Tokens after the last span are in
            no segment.
        """
        texts = np.repeat(first_rows(lengths)[:-1], self.counts)
        cu_seqlens = np.concatenate(([0], texts + self.bounds[:, 1])).astype(np.int32)
        starts = (texts + self.bounds[:, 0] - cu_seqlens[:-1]).astype(np.int32)
        return cu_seqlens, starts


def first_rows(counts: IntArray) -> npt.NDArray[np.int64]:
    """Return where the rows of each text begin, and how many there are, int64 [B + 1]."""
    rows = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=rows[1:])
    return rows


def gather(counts: IntArray, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the places of the texts' rows, where the texts are taken in another order.

    Args:
        counts: rows per text, int32 [B].
        order: which text comes first, second and so on.
    """
    taken = counts[order]
    new_starts = first_rows(taken)[:-1]
    return np.arange(taken.sum(dtype=np.int64)) + np.repeat(
        first_rows(counts)[order] - new_starts, taken
    )
