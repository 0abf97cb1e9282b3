"""What the measuring tools have in common: bounds that are kept or broken, tables, pages.

A tool collects its figures in a `Report`, prints it, and may write it as a page and as JSON.
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "benchmarks"
MODELS = ROOT / ".models"


@dataclass(frozen=True)
class Check:
    """A figure with the bound that it has to keep."""

    name: str
    value: str
    bound: str
    kept: bool


@dataclass(frozen=True)
class Table:
    """A table of a report; all cells are text."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table in Markdown, with its title above it."""
        widths = [
            max(3, *(len(row[i]) for row in (self.columns, *self.rows)))
            for i in range(len(self.columns))
        ]
        lines = [self.columns, ["-" * width for width in widths], *self.rows]
        padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
        body = "\n".join(f"| {' | '.join(line)} |" for line in padded)
        return f"**{self.title}**\n\n{body}\n"


@dataclass
class Report:
    """The figures of one run of a tool.

    Attributes:
        name: Of the tool, and of its page.
        title: The page's heading.
        about: What was measured and how, in a sentence or two.
        data: Whatever else should be in the JSON.
    """

    name: str
    title: str
    about: str
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, value: object, bound: str, kept: bool) -> None:
        """Add a figure with its bound, and show it at once if the bound is broken."""
        self.checks.append(Check(name, str(value), bound, bool(kept)))
        if not kept:
            print(f"BROKEN: {name} is {value}, must be {bound}", file=sys.stderr, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table."""
        self.tables.append(Table(title, list(columns), [[str(c) for c in row] for row in rows]))

    @property
    def kept(self) -> bool:
        """Whether every bound is kept."""
        return all(check.kept for check in self.checks)

    def markdown(self) -> str:
        """The page."""
        parts = [
            f"# {self.title}",
            self.about,
            f"Machine: {machine()}.",
            f"```\n{command_line()}\n```",
        ]
        if self.checks:
            rows = [[c.name, c.value, c.bound, "yes" if c.kept else "**no**"] for c in self.checks]
            parts.append(Table("Bounds", ["figure", "value", "bound", "kept"], rows).markdown())
        parts += [table.markdown() for table in self.tables]
        parts += self.notes
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"

    def finish(self, options: argparse.Namespace) -> int:
        """Print the report, write what `options` ask for, and return the exit code."""
        print(f"\n{self.markdown()}")
        if options.json:
            Path(options.json).write_text(json.dumps(asdict(self), indent=1, default=str) + "\n")
        if options.write_page:
            PAGES.mkdir(parents=True, exist_ok=True)
            (PAGES / f"{self.name}.md").write_text(self.markdown())
        return 0 if self.kept else 1


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `Report.finish` reads."""
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--write-page", action="store_true", help="write the figures to docs/benchmarks"
    )


def machine() -> str:
    """CPU model, cores that this process may use, and torch's version, in one line."""
    model = "unknown CPU"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*: (.+)", cpuinfo.read_text())):
        model = found[1].strip()
    return f"{model}, {cores()} cores, torch {version('torch')}"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command_line() -> str:
    """The command that is running, without its outputs and what is particular to this machine."""
    outputs = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_output_options(outputs)
    shown = [_shown(word) for word in outputs.parse_known_args()[1]]
    return shlex.join(["python", f"tools/{Path(sys.argv[0]).name}", *shown])


def _shown(word: str) -> str:
    if not word.startswith("/"):
        return word
    path = Path(word)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def beside(*names: str) -> Path | None:
    """A folder or file of shared data beside the repository, if it is there."""
    path = ROOT.parent.joinpath("shared", *names)
    return path if path.exists() else None
