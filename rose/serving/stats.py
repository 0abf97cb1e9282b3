"""An engine's numbers as an operator wants them: kept over restarts, summed over replicas."""

from collections.abc import Iterable

from msgspec.structs import asdict, replace

from rose.serving.protocol import COUNTERS, Stats


class LastingStats:
    """Numbers of an engine that may be started again: its counters never fall.

    Where they did, `rate()` and its like would take the fall of one of several replicas for a
    new start of all, and count everything once more.
    """

    def __init__(self) -> None:
        """Start with zeros."""
        self._last = Stats()
        self._before = dict.fromkeys(COUNTERS, 0)  # of the lives that have ended

    @property
    def current(self) -> Stats:
        """The numbers, counters summed over all lives."""
        return replace(
            self._last,
            **{name: before + getattr(self._last, name) for name, before in self._before.items()},
        )

    def update(self, stats: Stats) -> None:
        """Take in what the engine says; a counter that fell tells that it was started again."""
        if any(getattr(stats, name) < getattr(self._last, name) for name in COUNTERS):
            self._end_life()
        self._last = stats

    def lost(self) -> None:
        """The engine is gone, so nothing runs or waits there."""
        self._last = Stats(**{name: getattr(self._last, name) for name in COUNTERS})

    def _end_life(self) -> None:
        for name in COUNTERS:
            self._before[name] += getattr(self._last, name)


def total(parts: Iterable[Stats]) -> Stats:
    """Return the sums of the numbers of several engines."""
    numbers = [asdict(part) for part in parts]
    return Stats(**{name: sum(each[name] for each in numbers) for name in numbers[0]})
