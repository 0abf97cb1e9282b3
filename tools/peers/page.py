"""The page: tables of ROSE beside its peers, and of where a peer is ahead."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tools.peers.embedders import EMBEDDERS
from tools.peers.generators import QUANTIZED
from tools.peers.measuring import Outcome
from tools.peers.turns import Sample
from tools.peers.workloads import WORKLOADS, Inputs, Limits, Row, Workload, least_seconds
from tools.report import Report

ROSE, ROSE_FROM_TEXT = "ROSE", "ROSE, from text"
TIE = 0.05
ABOUT = (
    "ROSE and its peers with the same weights (all-MiniLM-L6-v2 and SmolLM2-135M-Instruct) and "
    "the same texts and token ids, computing in float32 on {threads} threads. Each engine has a "
    "process of its own; in every turn each does the row once, in an order that changes, and "
    "those that wait are stopped. Vectors and greedy tokens were compared with those of "
    "transformers first. `x ROSE` is the peer's time over ROSE's of the same run, medians of all "
    "turns: above 1, ROSE is faster. Engines that read text are compared with ROSE reading text, "
    "those with weights of 8 or 4 bits with ROSE of as many; their outputs need not be equal. "
    "Each workload was a run of its own (`--workloads NAME`)."
)


@dataclass(frozen=True)
class Ratio:
    """A peer's time over ROSE's: of the medians, and the least and most of single turns."""

    of_medians: float
    least: float
    most: float

    @classmethod
    def of(cls, peer: Sequence[Sample], rose: Sequence[Sample]) -> "Ratio":
        """Compare samples, turn by turn."""
        turns = [
            statistics.median(one["seconds"]) / statistics.median(other["seconds"])
            for one, other in zip(peer, rose, strict=False)
        ]
        return cls(median(peer) / median(rose), min(turns), max(turns))


def seconds_of(samples: Sequence[Sample]) -> list[float]:
    """All times of all turns."""
    return [seconds for sample in samples for seconds in sample["seconds"]]


def median(samples: Sequence[Sample]) -> float:
    """The median of all times of all turns."""
    return statistics.median(seconds_of(samples))


def baseline(workload: Workload, engine: str, samples: dict[str, list[Sample]]) -> str:
    """With what an engine is compared: ROSE that reads what it reads, or has the same width."""
    if workload.kind == "quantized":
        return f"{ROSE}, {QUANTIZED[engine].width}"
    if workload.kind == "embed" and EMBEDDERS[engine].reads == "text" and ROSE_FROM_TEXT in samples:
        return ROSE_FROM_TEXT
    return ROSE


def is_rose(engine: str) -> bool:
    """Whether an engine is ROSE, in one of the ways in which it is measured."""
    return engine.split(", ")[0] == ROSE


def ratios(workload: Workload, samples: dict[str, list[Sample]]) -> dict[str, Ratio]:
    """Each peer of a row against ROSE."""
    found = {}
    for engine, theirs in samples.items():
        against = baseline(workload, engine, samples)
        if not is_rose(engine) and samples.get(against):
            found[engine] = Ratio.of(theirs, samples[against])
    return found


def make_report(
    outcomes: dict[str, Outcome], inputs: Inputs, checkpoints: dict[str, Path], threads: int
) -> Report:
    """Put what was measured into tables."""
    report = Report("cpu", "ROSE and its peers on a CPU", ABOUT.format(threads=threads))
    configs = {
        kind: json.loads((checkpoints[name] / "config.json").read_text())
        for kind, name in (("embed", "embedder"), ("generate", "llm"))
    }
    add_own_checks(report, outcomes)
    add_behind(report, outcomes)
    for name, outcome in outcomes.items():
        workload = with_tokens(WORKLOADS[name], inputs)
        measured = outcome.measured
        limits = Limits(
            [one["flops"] for one in measured.limits], [one["bytes"] for one in measured.limits]
        )
        config = configs.get(workload.kind, {})
        least = {
            row.name: least_seconds(row, workload.kind, limits, config) if config else None
            for row in workload.rows
        }
        add_workload(report, workload, outcome, least)
    add_limits(report, outcomes)
    add_engines(report, outcomes)
    add_left_out(report, outcomes)
    report.data = {name: outcome.measured.rows for name, outcome in outcomes.items()}
    return report


def with_tokens(workload: Workload, inputs: Inputs) -> Workload:
    """The same with the number of tokens of the mixed texts, which are drawn."""
    total = sum(len(text.ids) for text in inputs.mixed)
    rows = [
        replace(row, tokens=total) if row.order.get("op") == "mixed" else row
        for row in workload.rows
    ]
    return replace(workload, rows=tuple(rows))


def add_own_checks(report: Report, outcomes: dict[str, Outcome]) -> None:
    """ROSE has to be there, and right, in every workload."""
    for name, outcome in outcomes.items():
        own = [engine for engine in outcome.engines if is_rose(engine) and engine != ROSE_FROM_TEXT]
        for engine in own or [ROSE]:
            reason = outcome.measured.failed.get(engine)
            value = reason or outcome.checks.get(engine, "measured")
            rounded = WORKLOADS[name].kind == "quantized"
            bound = "mostly as transformers begins" if rounded else "as transformers answers"
            report.check(f"{engine} in {name}", value, bound, reason is None)


def add_behind(report: Report, outcomes: dict[str, Outcome]) -> None:
    """List where a peer is ahead of ROSE, however little."""
    rows = [
        [WORKLOADS[name].title, row, engine, f"{ratio.of_medians:.2f}",
         f"{ratio.least:.2f} to {ratio.most:.2f}",
         "a tie" if ratio.of_medians > 1 - TIE else "**ahead**"]
        for name, outcome in outcomes.items()
        for row, samples in outcome.measured.rows.items()
        for engine, ratio in ratios(WORKLOADS[name], samples).items()
        if ratio.of_medians < 1
    ]  # fmt: skip
    columns = ["workload", "row", "peer", "x ROSE", "in single turns", f"(tie: within {TIE:.0%})"]
    report.table("Where a peer is ahead of ROSE", columns, rows or [["none"] + [""] * 5])


def add_workload(
    report: Report, workload: Workload, outcome: Outcome, least: dict[str, float | None]
) -> None:
    """The tables of a workload."""
    measured = outcome.measured.rows
    rows = [row for row in workload.rows if measured.get(row.name)]
    engines = list(dict.fromkeys(engine for row in rows for engine in measured[row.name]))
    turns = ", ".join(f"{row.name}: {max(map(len, measured[row.name].values()))}" for row in rows)
    table = []
    for engine in engines:
        cells = [engine]
        for row in rows:
            samples = measured[row.name]
            ratio = ratios(workload, samples).get(engine)
            cells.append(cell(workload, row, samples[engine]) if engine in samples else "")
            cells.append(f"{ratio.of_medians:.2f}" if ratio else "")
        table.append(cells)
    if any(least[row.name] for row in rows):
        table.append(["the machine's limit", *limit_cells(workload, rows, least, measured)])
    columns = ["engine"]
    columns += [word for row in rows for word in (f"{row.name}, {unit(workload)}", "x ROSE")]
    report.table(f"{workload.title} (turns of {turns})", columns, table)


def unit(workload: Workload) -> str:
    """What `cell` shows."""
    kinds = {"http": "p50 / p99 ms, requests/s", "start": "s, MiB", "ms": "ms (p90)"}
    return kinds.get(workload.kind) or kinds.get(workload.measure, workload.measure)


def cell(workload: Workload, row: Row, samples: Sequence[Sample]) -> str:
    """A figure as the table shows it."""
    seconds = seconds_of(samples)
    middle = statistics.median(seconds)
    if workload.kind == "http":
        rate = statistics.median(one["rate"] for one in samples)
        high = float(np.percentile(seconds, 99))
        return f"{1e3 * middle:.0f} / {1e3 * high:.0f}, {rate:.1f}"
    if workload.kind == "start":
        return f"{middle:.1f} s, {statistics.median(one['mib'] for one in samples):.0f} MiB"
    if workload.measure == "ms":
        return f"{milliseconds(middle)} ({milliseconds(float(np.percentile(seconds, 90)))})"
    return f"{row.units / middle:.1f}"


def milliseconds(seconds: float) -> str:
    """Milliseconds with as many digits as are worth reading."""
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def limit_cells(
    workload: Workload,
    rows: Sequence[Row],
    least: dict[str, float | None],
    measured: dict[str, dict[str, list[Sample]]],
) -> list[str]:
    """The least times in the table's form, and what they are of ROSE's."""
    cells = []
    for row in rows:
        limit = least[row.name]
        ours = measured[row.name].get(ROSE)
        if limit is None or ours is None:
            cells += ["", ""]
            continue
        value = milliseconds(limit) if workload.measure == "ms" else f"{row.units / limit:.1f}"
        cells += [value, f"{limit / median(ours):.2f}"]
    return cells


def add_limits(report: Report, outcomes: dict[str, Outcome]) -> None:
    """What the machine did in the turns of each workload."""
    rows = []
    for name, outcome in outcomes.items():
        row = [name]
        for key in ("flops", "bytes"):
            rates = [one[key] / 1e9 for one in outcome.measured.limits] or [float("nan")]
            row.append(f"{max(rates):.0f} ({statistics.median(rates):.0f}, {min(rates):.0f})")
        shares = [
            sample.get("others", 0.0)
            for samples in outcome.measured.rows.values()
            for turns in samples.values()
            for sample in turns
        ] or [0.0]
        rows.append([*row, f"{statistics.median(shares):.0%} ({max(shares):.0%})"])
    columns = ["in the turns of", "GFLOP/s, best (median, least)", "GB/s, best (median, least)"]
    columns.append("cores that others had, median (most)")
    report.table("The machine: float32 matrix products, and reading memory", columns, rows)
    if rows:
        report.notes.append(
            "The machine's limit is the slower of the linear layers' multiplications at the "
            "best rate of any matrix product, torch's or ROSE's, and of reading the weights "
            "once (once a step when decoding) at the best rate of reading memory, both of the "
            "same run. Attention and everything else are not in it. MiniLM's weights count 4 "
            "bytes, SmolLM2's the 2 that the checkpoint stores. What was measured while others "
            "had more than a tenth of the cores was measured again, up to three times, and the "
            "quietest was kept. Decoding times hold the prefill of the prompts; the memory of a"
            " server is that of its whole process tree, shared pages counted once."
        )


def add_engines(report: Report, outcomes: dict[str, Outcome]) -> None:
    """Versions, how engines are used, and how their answers compared."""
    rows = {}
    for name, outcome in outcomes.items():
        kind = WORKLOADS[name].kind
        use = {"embed": "embeds", "generate": "generates", "quantized": "generates"}.get(
            kind, "serves"
        )
        for engine, facts in outcome.engines.items():
            check = outcome.checks.get(engine, rows.get((engine, use), [""])[-1])
            packages = ", ".join(f"{p} {v}" for p, v in facts.get("versions", {}).items())
            notes = [facts["settings"]] if facts["settings"] else []
            if facts.get("batch"):
                notes.append(f"mixed texts {facts['batch']} at a time")
            if kind == "embed" and EMBEDDERS[engine].reads == "text":
                notes.append("reads text")
            rows[engine, use] = [engine, use, packages, "; ".join(notes), check]
    columns = ["engine", "here it", "versions", "used with", "against transformers"]
    report.table("Engines", columns, list(rows.values()))


def add_left_out(report: Report, outcomes: dict[str, Outcome]) -> None:
    """Engines without figures, and why."""
    rows = [
        [name, engine, reason.replace("|", "/").replace("\n", " ")]
        for name, outcome in outcomes.items()
        for engine, reason in outcome.measured.failed.items()
    ]
    report.table("Left out", ["workload", "engine", "reason"], rows or [["", "none", ""]])
