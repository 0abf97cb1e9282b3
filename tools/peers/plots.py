"""Pictures of what was measured, as SVG files beside the page."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from tools.peers.measuring import Outcome
from tools.peers.page import ROSE, median, ratios
from tools.peers.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "ROSE": "#d1495b",
    "ONNX Runtime": "#2e4057",
    "transformers": "#f2c14e",
    "sentence-transformers": "#c89b3c",
    "CTranslate2": "#5aa469",
    "OpenVINO": "#3d7ea6",
    "OpenVINO GenAI": "#3d7ea6",
    "vLLM": "#7a5195",
    "infinity": "#8d99ae",
    "infinity, ONNX": "#5c677d",
    "llama.cpp": "#bc6c25",
    "llama.cpp, bfloat16": "#dda15e",
    "fastembed": "#84a59d",
}


def draw(outcomes: dict[str, Outcome], folder: Path) -> list[str]:
    """Draw what there are figures for. Returns lines of Markdown that show the pictures."""
    pictures: tuple[tuple[str, str, Callable[[dict[str, Outcome]], Figure | None]], ...] = (
        ("cpu-embedding", "Time of each peer over ROSE's, by workload", _embedding),
        ("cpu-decode", "Tokens per second by streams", _decoding),
        ("cpu-http", "Time to the answer by concurrent clients", _http),
    )
    lines = []
    mpl.rcParams["svg.hashsalt"] = "rose"
    for name, title, make in pictures:
        figure = make(outcomes)
        if figure is not None:
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
            lines.append(f"![{title}]({name}.svg)")
    return lines


def _bars(axes: "Axes", values: dict[str, list[float]], labels: list[str]) -> None:
    """Groups of bars; `values` by engine, NaN where there is none."""
    width = 0.85 / max(1, len(values))
    places = np.arange(len(labels))
    for i, (engine, heights) in enumerate(values.items()):
        offset = (i - (len(values) - 1) / 2) * width
        axes.bar(places + offset, heights, width, label=engine, color=COLOURS.get(engine))
    axes.set_xticks(places, labels)
    axes.legend(fontsize=8, ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _embedding(outcomes: dict[str, Outcome]) -> "Figure | None":
    columns = {
        f"{row}": ratios(WORKLOADS[name], samples)
        for name in ("latency", "batches", "mixed")
        if name in outcomes
        for row, samples in outcomes[name].measured.rows.items()
    }
    if not columns:
        return None
    engines = list(dict.fromkeys(engine for found in columns.values() for engine in found))
    values = {
        engine: [
            found[engine].of_medians if engine in found else float("nan")
            for found in columns.values()
        ]
        for engine in engines
    }
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    _bars(axes, values, list(columns))
    axes.axhline(1, color=COLOURS[ROSE], linewidth=1.5)
    axes.annotate("ROSE", (len(columns) - 0.5, 1), color=COLOURS[ROSE], va="bottom", ha="right")
    axes.set_ylabel("time / ROSE's time")
    axes.set_ylim(0, min(4.0, 1.1 * float(np.nanmax(list(values.values())))))
    axes.set_title("Embedding with all-MiniLM-L6-v2: above the line, ROSE is faster")
    return figure


def _decoding(outcomes: dict[str, Outcome]) -> "Figure | None":
    if "decode" not in outcomes:
        return None
    measured = outcomes["decode"].measured.rows
    rows = [row for row in WORKLOADS["decode"].rows if measured.get(row.name)]
    engines = list(dict.fromkeys(engine for row in rows for engine in measured[row.name]))
    values = {
        engine: [
            row.units / median(measured[row.name][engine])
            if engine in measured[row.name]
            else float("nan")
            for row in rows
        ]
        for engine in engines
    }
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    _bars(axes, values, [row.name for row in rows])
    axes.set_ylabel("tokens/s of all streams")
    axes.set_title("Greedy decoding with SmolLM2-135M-Instruct, float32")
    return figure


def _http(outcomes: dict[str, Outcome]) -> "Figure | None":
    names = [name for name in ("http-128", "http-512") if name in outcomes]
    if not names:
        return None
    figure, panels = plt.subplots(
        1, len(names), figsize=(5.5 * len(names), 4), layout="constrained", squeeze=False
    )
    for axes, name in zip(panels[0], names, strict=True):
        measured = outcomes[name].measured.rows
        rows = [row for row in WORKLOADS[name].rows if measured.get(row.name)]
        for engine in measured[rows[0].name]:
            found = [row for row in rows if engine in measured[row.name]]
            clients = [row.order["clients"] for row in found]
            times = [1e3 * median(measured[row.name][engine]) for row in found]
            axes.plot(clients, times, "o-", color=COLOURS.get(engine), label=engine)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([row.order["clients"] for row in rows])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("concurrent clients")
        axes.set_ylabel("p50, ms")
        axes.set_title(WORKLOADS[name].title)
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
