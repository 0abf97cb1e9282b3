"""How far a job on a file is: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rose.serving.offline.wording import counted

PLAIN_INTERVAL_S = 10.0
BAR_REFRESHES_PER_S = 4


@dataclass(slots=True)
class Meter:
    """Counts what is done, and from it the rates and the time left.

    `total` and `done` are in the unit in which the source counts itself (bytes or rows); `total`
    is None where nobody knows. `texts_before` and `done_before` are what an earlier run did, which
    counts as done but not for the rates.
    """

    total: int | None
    texts_before: int = 0
    done_before: float = 0.0
    texts: int = 0
    tokens: int = 0
    done: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def fraction(self) -> float | None:
        """Part of the source that is done, from 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else None

    def seconds_left(self, now: float) -> float | None:
        """Return how long the rest takes at the pace so far."""
        covered = self.done - self.done_before
        if not self.total or covered <= 0:
            return None
        return (now - self.began) * max(0.0, self.total - self.done) / covered

    def describe(self, now: float) -> str:
        """Say it in words."""
        elapsed = max(now - self.began, 1e-9)
        parts = [
            counted(self.texts_before + self.texts, "text"),
            f"{_rate(self.texts / elapsed)} texts/s",
            f"{_rate(self.tokens / elapsed)} tokens/s",
        ]
        left = self.seconds_left(now)
        return ", ".join(parts if left is None else [*parts, f"about {_duration(left)} left"])


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Display(Protocol):
    """Shows a meter; called often."""

    def __call__(self, meter: Meter) -> None:
        """Show how far it is now."""
        ...


@contextmanager
def open_display(stream: TextIO | None = None) -> Iterator[Display]:
    """Yield what suits `stream` (standard error): a bar on a terminal, else plain lines."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield PlainDisplay(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    console = Console(file=stream)
    rate = BAR_REFRESHES_PER_S
    with Progress(*columns, console=console, refresh_per_second=rate, transient=True) as progress:
        task = progress.add_task("loading the model", total=None)

        def show(meter: Meter) -> None:
            progress.update(
                task,
                total=meter.total,
                completed=meter.done,
                description=meter.describe(time.monotonic()),
            )

        yield show


class PlainDisplay:
    """Writes a line every ten seconds."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream
        self._last = time.monotonic()

    def __call__(self, meter: Meter) -> None:
        """Write a line if the last one is long enough ago."""
        now = time.monotonic()
        if now - self._last < PLAIN_INTERVAL_S:
            return
        self._last = now
        percent = "" if meter.fraction is None else f"{meter.fraction:.0%}: "
        self._stream.write(f"{percent}{meter.describe(now)}\n")
        self._stream.flush()
