"""Interleaved measurement: each engine does a row once a turn, in an order that changes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.peers.processes import PeerError

FEWEST_TURNS = 3
QUIET = 0.1  # share of the cores that others may have
TRIES = 3
Sample = dict[str, Any]


@dataclass
class Measured:
    """What the turns of a workload gave.

    Attributes:
        rows: By row and engine, a sample for each turn: {"seconds": [...], ...}.
        failed: Engines that fell out, and why.
        limits: Of the machine, a sample for each turn.
    """

    rows: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    limits: list[Sample] = field(default_factory=list)


def orders_of_turns(names: Sequence[str], turns: int) -> Iterator[list[str]]:
    """The order of each turn: every other one is reversed, and each begins one further."""
    for turn in range(turns):
        start = turn % len(names) if names else 0
        rotated = [*names[start:], *names[:start]]
        yield rotated if turn % 2 == 0 else rotated[::-1]


def take_turns(
    row: str,
    engines: dict[str, Callable[[], Sample]],
    measured: Measured,
    turns: int,
    limit_s: float,
    limits: Callable[[], Sample] | None = None,
) -> None:
    """Let engines do a row in turns, at least three times; more only within `limit_s`.

    What was measured while others were at work is measured again, and the least disturbed is kept.
    An engine that fails is left out from then on, and out of `engines`.
    """
    deadline = time.monotonic() + limit_s
    samples: dict[str, list[Sample]] = measured.rows.setdefault(row, {})
    for turn, order in enumerate(orders_of_turns(list(engines), turns)):
        if turn >= FEWEST_TURNS and time.monotonic() > deadline:
            break
        if limits is not None:
            measured.limits.append(limits())
        for name in order:
            if name not in engines:
                continue
            try:
                sample = least_disturbed(engines[name])
                samples.setdefault(name, []).append(sample)
            except PeerError as error:
                measured.failed[name] = f"{row}: {error}"
                samples.pop(name, None)
                del engines[name]


def least_disturbed(measure: Callable[[], Sample]) -> Sample:
    """Measure until the machine was quiet, a few times at most; the quietest sample."""
    best = measure()
    for _ in range(TRIES - 1):
        if best.get("others", 0.0) <= QUIET:
            break
        best = min(best, measure(), key=lambda sample: sample["others"])
    return best
