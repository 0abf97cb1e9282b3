"""Which states are kept for the prefix cache of models whose layers carry a state.

Pages alone do not continue a text there: the state at their end is needed too. So states are kept
("snapshots") at some page boundaries, each in a row of the state pool and tied to the cached page
that ends there. A text can start at the deepest boundary that has one.

Plain Python: this is the book-keeping, the tensors are elsewhere. A row is free, reserved (a step
in flight writes it) or kept. Steps run in order, and a step reads snapshots before it writes any,
so a row can be given to another as soon as it is planned. The least recently used goes first.

Layers compute a text chunk by chunk, and a text that is cut within a chunk is rounded otherwise. So
snapshots, which others' texts have a say in, lie at ends of chunks, counted from the text's start:
`grid`.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable

MIN_GAP = 64
"""Tokens from one snapshot of a text to the next, at least: fewer are computed again instead."""

MIN_INTERVAL = 512
"""Tokens between those that are kept wherever a text may part from another, at least."""

PARTS = 4  # into which these cut a text at most


class Snapshots:
    """Hands out the rows, and finds the state at the end of a cached page."""

    def __init__(
        self,
        num_rows: int,
        first: int,
        *,
        grid: int = 1,
        gap: int = MIN_GAP,
        interval: int = MIN_INTERVAL,
    ) -> None:
        """Manage `num_rows` rows.

        Args:
            num_rows: states that can be kept.
            first: the first row, counted as the scheduler counts the slots of sequences.
            grid: tokens of a chunk in the layers that carry the state.
            gap: tokens from one snapshot of a text to the next, at least.
            interval: tokens between those that are kept regularly, at least.
        """
        self.num_rows = num_rows
        self.grid = grid
        self._first = first
        self._gap = gap
        self._interval = interval
        self._free = list(range(first + num_rows - 1, first - 1, -1))
        self._reserved: set[int] = set()
        self._row_of: OrderedDict[int, int] = OrderedDict()  # least recently used first

    def interval(self, length: int) -> int:
        """Return the distance of regular snapshots in a text of `length` tokens.

        It doubles with the text, so that there are few, and longer texts share theirs with shorter
        ones.
        """
        interval = self._interval
        while interval * PARTS < length:
            interval *= 2
        return interval

    def is_regular(self, position: int) -> bool:
        """Whether a text that has grown to `position` tokens has a regular snapshot there."""
        return position % self.interval(position) == 0

    def unit(self, page_size: int) -> int:
        """Return what all positions are multiples of: ends of pages and of chunks."""
        return math.lcm(page_size, self.grid)

    def choose(self, start: int, length: int, page_size: int, shared: Iterable[int]) -> set[int]:
        """Choose where to keep the state of a text that is about to be computed.

        That is where other texts part from it, at its last full page and chunk (but for the last
        token, so that an equal text can start there), and regularly between.

        Args:
            start: tokens that need no computing.
            length: tokens of the text.
            page_size: tokens of a page.
            shared: leading tokens that other texts have in common with it.

        Returns:
            Positions: the state after so many tokens.
        """
        unit = self.unit(page_size)
        last = (length - 1) // unit * unit
        chosen: list[int] = []
        for position in sorted({*(tokens // unit * unit for tokens in shared), last}):
            if position <= last and position - max([start, *chosen]) >= self._gap:
                chosen.append(position)
        step = self.interval(length)
        for position in range(start // step * step + step, last, step):
            if all(abs(position - other) >= self._gap for other in (start, *chosen)):
                chosen.append(position)
        return set(chosen)

    def find(self, serial: int) -> int | None:
        """Return the row with the state at the end of a page, None if it was not kept."""
        return self._row_of.get(serial)

    def touch(self, serial: int) -> None:
        """Note that a snapshot is used."""
        self._row_of.move_to_end(serial)

    def reserve(self) -> int | None:
        """Hand out a row for a step to write, at the cost of the least recently used snapshot.

        None if steps in flight write all of them.
        """
        if not self._free and not self._row_of:
            return None
        row = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
        self._reserved.add(row)
        return row

    def keep(self, row: int, serial: int) -> None:
        """Let a row that was written be found. If the page has one already, that one stays."""
        assert row in self._reserved, f"row {row} was kept without being reserved"
        if serial not in self._row_of:
            self._reserved.remove(row)
            self._row_of[serial] = row

    def settle(self, row: int) -> None:
        """Take a row back whose step is done, unless it is kept."""
        if row in self._reserved:
            self._reserved.remove(row)
            self._free.append(row)

    def drop(self, serial: int) -> None:
        """Forget the state at the end of a page, if there is one."""
        row = self._row_of.pop(serial, None)
        if row is not None:
            self._free.append(row)

    def check(self, serials: Collection[int]) -> None:
        """Assert every invariant; `serials` are those of the cached pages."""
        rows = [*self._free, *self._reserved, *self._row_of.values()]
        assert sorted(rows) == list(range(self._first, self._first + self.num_rows)), (
            "a row is lost or in two states"
        )
        assert self._row_of.keys() <= set(serials), "a snapshot outlived its page"

    @property
    def num_reserved(self) -> int:
        """Rows that steps in flight write."""
        return len(self._reserved)

    @property
    def num_kept(self) -> int:
        """Snapshots that can be found."""
        return len(self._row_of)
