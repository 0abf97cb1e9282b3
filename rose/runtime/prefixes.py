"""What sequences have in common: what the prefix cache has of them, or will have.

Plain Python. It ties sequences to the page pool, and to the snapshots of models whose layers carry
a state.
"""

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from rose.runtime.kv_cache import CachedPrefix, PagePool
from rose.runtime.sequence import KeptState, PlanRow, Sequence

WORTH_WAITING_FOR = 64
"""Tokens of a prompt from which on it waits for an equal one that is being computed."""

PEERS = 4
"""Sequences at the head of the queue that are compared with one that is let in."""


class Prefixes:
    """Finds prefixes in a page pool, and offers it what was computed."""

    def __init__(self, pool: PagePool) -> None:
        """Search `pool`."""
        self._pool = pool

    def find(self, sequence: Sequence) -> CachedPrefix:
        """Find what is cached of a sequence, all but its last token: that brings the next one."""
        limit = len(sequence.token_ids) - 1
        if sequence.params.prompt_logprobs is not None:
            limit = min(limit, sequence.prompt_rows)
        return self._pool.find(sequence.token_ids, sequence.params.cache_salt, limit)

    def is_coming(
        self, sequence: Sequence, prefix: CachedPrefix, running: Iterable[Sequence]
    ) -> bool:
        """Whether most of what a sequence lacks is being computed: a system prompt, n choices.

        It then waits and finds the pages, instead of computing the same beside the other. Where a
        state is needed too, what counts is where the other will leave one.
        """
        if not self._pool.caching or sequence.params.prompt_logprobs is not None:
            return False
        found = len(prefix.pages)
        lacking = len(sequence.token_ids) - found * self._pool.page_size
        for other in running:
            if len(other.token_ids) // self._pool.page_size == other.registered:
                continue  # all that it has can be found already
            shared = self._shared_pages(sequence, other)
            if self._pool.snapshots is not None:
                marks = [mark // self._pool.page_size for mark in other.marks]
                shared = max((mark for mark in marks if mark <= shared), default=0)
            gain = (shared - found) * self._pool.page_size
            if shared > other.registered and gain >= max(WORTH_WAITING_FOR, lacking / 2):
                return True
        return False

    def _shared_pages(self, one: Sequence, other: Sequence) -> int:
        """Count the leading full pages, but for the last token of `one`, that are equal."""
        if one.params.cache_salt != other.params.cache_salt:
            return 0
        size, a, b = self._pool.page_size, one.token_ids, other.token_ids
        most = min(len(a) - 1, len(b)) // size
        return bisect_left(range(1, most + 1), True, key=lambda n: a[: n * size] != b[: n * size])

    def choose_marks(
        self, sequence: Sequence, prefix: CachedPrefix, waiting: SequenceOf[Sequence]
    ) -> None:
        """Choose where its state is kept: also where it parts from others, of before or to come."""
        snapshots, size = self._pool.snapshots, self._pool.page_size
        if snapshots is None or not self._pool.caching:
            return
        if prefix.snapshot is not None:
            assert isinstance(prefix.parent, int), "a snapshot without a page"
            snapshots.touch(prefix.parent)
        shared = [prefix.known]
        shared += [self._shared_pages(other, sequence) for other in waiting[:PEERS]]
        positions = [pages * size for pages in shared]
        length = len(sequence.token_ids)
        sequence.marks = snapshots.choose(sequence.computed, length, size, positions)

    def cut(self, sequence: Sequence, budget: int) -> int:
        """Return how many of at most `budget` tokens a step takes.

        Where layers carry a state, a part of a text ends with a chunk of theirs, as in a step of
        another size, unless the budget ends before the chunk does.
        """
        snapshots, start = self._pool.snapshots, sequence.computed
        if sequence.remaining <= budget:
            return sequence.remaining
        if snapshots is None:
            return budget
        end = (start + budget) // snapshots.grid * snapshots.grid
        return end - start if end > start else budget

    def keep(self, sequence: Sequence, end: int) -> tuple[KeptState, ...]:
        """Reserve rows for the marks up to `end`, which the next tokens of a sequence reach."""
        snapshots = self._pool.snapshots
        if snapshots is None or not self._pool.caching:
            return ()
        if end >= sequence.prompt_len and snapshots.is_regular(end):
            sequence.marks.add(end)
        kept = []
        for mark in sorted(mark for mark in sequence.marks if sequence.computed < mark <= end):
            if (row := snapshots.reserve()) is None:
                sequence.marks.remove(mark)
            else:
                kept.append(KeptState(mark, row))
        return tuple(kept)

    def register(self, row: PlanRow) -> None:
        """Offer what a row has computed, now known, to the prefix cache."""
        sequence, size = row.sequence, self._pool.page_size
        rows = dict(row.kept)
        for index in range(sequence.registered, row.end // size):
            end = (index + 1) * size
            tokens = sequence.token_ids[index * size : end]
            sequence.parent = self._pool.register(
                sequence.pages[index], sequence.parent, tokens, rows.get(end)
            )
            sequence.registered = index + 1
            if end in rows and isinstance(sequence.parent, int):
                sequence.kept.append(sequence.parent)

    def settle(self, row: PlanRow) -> None:
        """Note that the step of a row is done: what it was to keep is kept by now, or never."""
        for _, kept in row.kept:
            assert self._pool.snapshots is not None, "a state was kept without snapshots"
            self._pool.snapshots.settle(kept)
