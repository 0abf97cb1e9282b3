"""What a tokenizer puts around two texts: `[CLS] query [SEP] document [SEP]` and its like.

It is found by looking at one pair. Tokens of a text do not depend on the text that it is paired
with, so a pair is put together from the ids of its texts, each tokenised once.
"""

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import tokenizers

Ids = npt.NDArray[np.int32]

_PROBES = ("a", "the", "1", ".")


@dataclass(frozen=True)
class PairLayout:
    """Special tokens before, between and behind two texts, with their segments, int32 each.

    `text_segments` are those of the texts' own tokens.
    """

    before: Ids
    between: Ids
    behind: Ids
    before_segments: Ids
    between_segments: Ids
    behind_segments: Ids
    text_segments: tuple[int, int]

    @property
    def num_special(self) -> int:
        """Tokens that are of neither text."""
        return len(self.before) + len(self.between) + len(self.behind)

    def join(self, first: Ids, second: Ids) -> Ids:
        """Put two texts together."""
        return np.concatenate([self.before, first, self.between, second, self.behind])

    def segments(self, first: int, second: int) -> Ids:
        """Return the segment of each token of a pair of texts with so many tokens."""
        of_first, of_second = self.text_segments
        return np.concatenate(
            [
                self.before_segments,
                np.full(first, of_first, np.int32),
                self.between_segments,
                np.full(second, of_second, np.int32),
                self.behind_segments,
            ]
        )


def find_pair_layout(backend: tokenizers.Tokenizer) -> PairLayout | None:
    """Return the layout of a tokenizer, None if it does not treat two texts in such a way."""
    for probe in _PROBES:
        bare = backend.encode(probe, add_special_tokens=False).ids
        encoding = backend.encode_batch_fast([(probe, probe)])[0]
        runs = _runs(encoding)
        texts = [run for run in runs if run[0] is not None]
        is_pair = [source for source, *_ in texts] == [0, 1]
        if is_pair and all(ids == bare for _, ids, _ in texts):
            return _layout(runs)
    return None


Run = tuple[int | None, list[int], list[int]]  # text 0 or 1 or None, its ids, their segments


def _runs(encoding: tokenizers.Encoding) -> list[Run]:
    tokens = zip(encoding.sequence_ids, encoding.ids, encoding.type_ids, strict=True)
    groups = ((source, list(group)) for source, group in groupby(tokens, itemgetter(0)))
    return [(source, [t[1] for t in group], [t[2] for t in group]) for source, group in groups]


def _layout(runs: list[Run]) -> PairLayout:
    sources = [run[0] for run in runs]
    first, second = sources.index(0), sources.index(1)
    between = runs[first + 1] if second - first == 2 else None
    parts = [runs[0] if first else None, between, runs[-1] if second < len(runs) - 1 else None]
    ids = [np.array(part[1] if part else [], np.int32) for part in parts]
    segments = [np.array(part[2] if part else [], np.int32) for part in parts]
    return PairLayout(
        *(ids[0], ids[1], ids[2]),
        *(segments[0], segments[1], segments[2]),
        text_segments=(runs[first][2][0], runs[second][2][0]),
    )
