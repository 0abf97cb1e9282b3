"""What was measured, as a table, as JSON and as a picture."""

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rose._version import __version__
from rose.serving.bench.loads import Load

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(slots=True)
class Row:
    """A target under a load.

    `seconds` are those of each request (decode: until the first token), `walls` those of each
    turn with all its clients, in which `texts` or new tokens were finished (`per_turn`).
    `token_seconds` are those of a token after the first, for each stream.
    """

    target: str
    load: Load
    per_turn: int = 0
    seconds: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Texts or new tokens a second, in the median of the turns."""
        return self.per_turn / float(np.median(self.walls))

    def milliseconds(self, percentile: float) -> float:
        """A percentile of the requests' times."""
        return 1e3 * float(np.percentile(self.seconds, percentile))


@dataclass(frozen=True, slots=True)
class Check:
    """Whether answers agree, which comes before any speed."""

    name: str
    value: str
    kept: bool


@dataclass(slots=True)
class Results:
    """One run of a benchmark."""

    bench: str
    model: str
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether all answers agree."""
        return all(check.kept for check in self.checks)

    def first(self, load: Load) -> Row:
        """The row of a load to which the others are compared."""
        return next(row for row in self.rows if row.load == load)

    def ratio(self, row: Row) -> float:
        """How many times as long as the first target a row's target takes."""
        first = self.first(row.load)
        if row.load.new_tokens or self.bench == "throughput":
            return first.rate / row.rate
        return row.milliseconds(50) / first.milliseconds(50)


Column = tuple[str, Callable[[Row], str]]


def _percentile(name: str, percentile: float) -> Column:
    return name, lambda row: f"{row.milliseconds(percentile):.2f}"


_LATENCY: tuple[Column, ...] = (
    ("requests", lambda row: f"{len(row.seconds)}"),
    _percentile("p50 ms", 50),
    _percentile("p90 ms", 90),
    _percentile("p99 ms", 99),
    _percentile("max ms", 100),
)
_RATES: tuple[Column, ...] = (
    ("texts/s", lambda row: f"{row.rate:.1f}"),
    ("tokens/s", lambda row: f"{row.rate * row.load.tokens:,.0f}"),
)
_DECODE: tuple[Column, ...] = (
    ("turns", lambda row: f"{len(row.walls)}"),
    ("first token, p50 ms", lambda row: f"{row.milliseconds(50):.1f}"),
    ("p99", lambda row: f"{row.milliseconds(99):.1f}"),
    ("a token, p50 ms", lambda row: f"{1e3 * float(np.median(row.token_seconds)):.2f}"),
    ("p99 ", lambda row: f"{1e3 * float(np.percentile(row.token_seconds, 99)):.2f}"),
    ("new tokens/s", lambda row: f"{row.rate:.1f}"),
)


def columns_of(bench: str) -> tuple[Column, ...]:
    """What the table of a benchmark shows."""
    if bench == "decode":
        return _DECODE
    return (*_LATENCY, *_RATES) if bench in ("throughput", "concurrency") else _LATENCY


def print_results(results: Results, console: "Console") -> None:
    """Write the table, after what was checked."""
    for check in results.checks:
        style = None if check.kept else "red"
        console.print(f"{check.name}: {check.value}", style=style, highlight=False, markup=False)
    console.print(_table(results))
    for note in results.notes:
        console.print(note, style="dim", highlight=False, markup=False)


def _table(results: Results) -> "Table":
    from rich import box
    from rich.table import Table

    columns, compared = columns_of(results.bench), len({row.target for row in results.rows}) > 1
    table = Table("load", "target", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, _ in columns:
        table.add_column(name, justify="right")
    if compared:
        table.add_column("time, ratio", justify="right")
    for row in results.rows:
        cells = [show(row) for _, show in columns]
        ratio = [f"{results.ratio(row):.2f}"] if compared else []
        table.add_row(row.load.name, row.target, *cells, *ratio)
    return table


def machine() -> str:
    """Name the CPU and count the cores that this process may use."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*: (.+)", cpuinfo.read_text())):
        model = found[1].strip()
    affinity = getattr(os, "sched_getaffinity", None)
    return f"{model}, {len(affinity(0)) if affinity else os.cpu_count()} cores"


def as_json(results: Results) -> dict[str, Any]:
    """Return everything that was measured, and what it means, as JSON can hold it."""
    rows = [
        {
            **asdict(row),
            "name": row.load.name,
            "rate": row.rate,
            "ratio": results.ratio(row),
            "milliseconds": {
                name: row.milliseconds(p)
                for name, p in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100))
            },
        }
        for row in results.rows
    ]
    return {
        "bench": results.bench,
        "model": results.model,
        "rose": __version__,
        "machine": machine(),
        "command": shlex.join(["rose", *sys.argv[1:]]),
        "checks": [asdict(check) for check in results.checks],
        "rows": rows,
        "notes": results.notes,
    }


def write_json(results: Results, path: Path) -> None:
    """Write the file for machines."""
    path.write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")


def draw(results: Results, path: Path) -> None:
    """Draw bars: milliseconds with a line to the 99th percentile, or texts or tokens a second.

    Raises:
        ValueError: matplotlib is missing, or does not know the kind of picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'rose-engine[bench]'") from None
    rates = results.bench in ("throughput", "decode")
    targets = list(dict.fromkeys(row.target for row in results.rows))
    names = list(dict.fromkeys(row.load.name for row in results.rows))
    figure = Figure(figsize=(2 + 1.6 * len(names), 4), layout="constrained")
    axes = figure.subplots()
    for index, target in enumerate(targets):
        rows = [row for row in results.rows if row.target == target]
        places = [names.index(row.load.name) + 0.8 * index / len(targets) for row in rows]
        heights, ends = _bars(rows, rates=rates)
        axes.bar(places, heights, 0.75 / len(targets), yerr=ends, capsize=2, label=target)
    axes.set_xticks([i + 0.4 - 0.4 / len(targets) for i in range(len(names))], names, fontsize=8)
    axes.set_ylabel(_unit(results.bench) if rates else "ms, p50 (line: p99)")
    axes.set_title(f"rose bench {results.bench}: {results.model}", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _unit(bench: str) -> str:
    return "new tokens/s" if bench == "decode" else "texts/s"


def _bars(rows: Sequence[Row], *, rates: bool) -> tuple[list[float], list[list[float]] | None]:
    """Return heights, and what lines add below and above."""
    if rates:
        return [row.rate for row in rows], None
    heights = [row.milliseconds(50) for row in rows]
    above = [row.milliseconds(99) - height for row, height in zip(rows, heights, strict=True)]
    return heights, [[0.0] * len(rows), above]
