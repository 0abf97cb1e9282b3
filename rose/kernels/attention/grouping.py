"""Groups of sequences that are attended together, so that many short ones take few kernel calls.

Pure host code: it sees lengths, not tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A group may hold this many times its real scores, and some more: so many cost less than a call.
PADDING_RATIO, PADDING_SLACK = 1.25, 256


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are attended together, shorter ones padded at the end to the longest.

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


def group_sequences(
    query_lens: Sequence[int], kv_lens: Sequence[int], *, short: int
) -> list[Group]:
    """Group the sequences of a batch; those without queries are left out.

    Sequences without cached tokens that are equally long and adjacent need no copies to be attended
    together. Others are worth copies only where they are many and at most `short` tokens long; then
    they share a group where little padding fits them together. Sequences with cached tokens, whose
    keys are gathered anyway, share a group with those of as many queries and about as many keys.
    """
    busy = [i for i, query in enumerate(query_lens) if query]
    fresh = [i for i in busy if query_lens[i] == kv_lens[i]]
    cached = [i for i in busy if query_lens[i] != kv_lens[i]]
    runs = _equal_runs(fresh, query_lens)
    brief = [run for run in runs if query_lens[run[0]] <= short]
    merged = _alike((i for run in brief for i in run), query_lens, kv_lens, same_queries=False)
    if 2 * len(merged) <= len(brief):
        runs = [run for run in runs if query_lens[run[0]] > short] + merged
    groups = runs + _alike(cached, query_lens, kv_lens, same_queries=True)
    return [
        Group(tuple(m), tuple(query_lens[i] for i in m), tuple(kv_lens[i] for i in m))
        for m in groups
    ]


def _equal_runs(members: list[int], query_lens: Sequence[int]) -> list[list[int]]:
    """Split fresh sequences into runs of equal length whose tokens lie side by side."""
    runs: list[list[int]] = []
    for i in members:
        if runs:
            before = runs[-1][-1]
            adjacent = not any(query_lens[before + 1 : i])
            if adjacent and query_lens[before] == query_lens[i]:
                runs[-1].append(i)
                continue
        runs.append([i])
    return runs


def _alike(
    members: Iterable[int],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    same_queries: bool,
) -> list[list[int]]:
    """Split sequences into groups of like length within the padding limit."""
    groups: list[list[int]] = []
    real = 0  # scores of the open group without padding
    queries = query_lens if same_queries else [0] * len(query_lens)
    for i in sorted(members, key=lambda i: (queries[i], kv_lens[i])):
        scores = query_lens[i] * kv_lens[i]
        joins = (
            bool(groups)
            and queries[i] == queries[groups[-1][0]]
            and (len(groups[-1]) + 1) * scores <= PADDING_RATIO * (real + scores) + PADDING_SLACK
        )
        if joins:
            groups[-1].append(i)
        else:
            groups.append([i])
            real = 0
        real += scores
    return [sorted(group) for group in groups]
