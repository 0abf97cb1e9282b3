"""Groups of sequences of like length, so that a batch of many short ones takes few kernel calls.

Pure host code: it sees lengths, not tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PADDING_LIMIT = 1.25  # padded scores over real ones, at most, within a group


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are attended together, padded at the end to the longest.

    `members` are their places in the batch, ascending; `query_lens` and `kv_lens` go with them.
    """

    members: tuple[int, ...]
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(L, M): queries and keys of each sequence, padding included."""
        return max(self.query_lens), max(self.kv_lens)

    @property
    def is_fresh(self) -> bool:
        """Whether no sequence has cached tokens: every key is a token of this forward pass."""
        return self.query_lens == self.kv_lens

    @property
    def is_uniform(self) -> bool:
        """Whether all sequences are equally long."""
        return len(set(self.kv_lens)) == 1


def group_sequences(query_lens: Sequence[int], kv_lens: Sequence[int]) -> list[Group]:
    """Group sequences by like length.

    Sequences without queries are left out. Those without cached tokens share a group where little
    padding fits them together; those with cached tokens only with others that have as many queries.

    Returns:
        Groups in order of rising length, fresh ones first.
    """
    lengths = list(zip(query_lens, kv_lens, strict=True))
    order = sorted(
        (i for i, (query, _) in enumerate(lengths) if query),
        key=lambda i: (lengths[i][0] != lengths[i][1], _shared_queries(*lengths[i]), lengths[i][1]),
    )
    groups: list[list[int]] = []
    real = 0  # scores of the open group without padding
    for i in order:
        query, kv = lengths[i]
        if groups and _fits(lengths, groups[-1], real, i):
            groups[-1].append(i)
        else:
            groups.append([i])
            real = 0
        real += query * kv
    return [_group(sorted(members), lengths) for members in groups]


def _shared_queries(query: int, kv: int) -> int:
    """The number of queries that a group must share: 0 where padding may even it out."""
    return 0 if query == kv else query


def _fits(lengths: list[tuple[int, int]], members: list[int], real: int, new: int) -> bool:
    """Whether the longer sequence `new` joins the open group without too much padding."""
    query, kv = lengths[new]
    last_query, last_kv = lengths[members[-1]]
    if (query == kv) != (last_query == last_kv):
        return False
    if query != kv and query != last_query:
        return False
    return (len(members) + 1) * query * kv <= PADDING_LIMIT * (real + query * kv)


def _group(members: list[int], lengths: list[tuple[int, int]]) -> Group:
    return Group(
        tuple(members),
        tuple(lengths[i][0] for i in members),
        tuple(lengths[i][1] for i in members),
    )
