"""Pictures of device graphs: which buckets batches fall into, and what became of each.

Tokens run down, sequences across; buckets that differ only in the longest sequence share a place.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rose.serving.protocol import GraphCell, GraphGrid, GraphState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

TITLES = {"embed": "Batches of texts", "score": "Batches to score", "decode": "Decode steps"}
SYMBOLS: dict[GraphState, str] = {"captured": "■", "warm": "○", "failed": "x", "cold": "·"}
STYLES: dict[GraphState, str] = {
    "captured": "green",
    "warm": "yellow",
    "failed": "red",
    "cold": "dim",
}
COLOURS: dict[GraphState, str] = {
    "captured": "#5aa469",
    "warm": "#f2c14e",
    "failed": "#d1495b",
    "cold": "#d8dee6",
}
MEANINGS: dict[GraphState, str] = {
    "captured": "captured: replayed from now on",
    "warm": "warm: captured at a later batch",
    "failed": "failed: always eager",
    "cold": "cold: evicted",
}


class Place(NamedTuple):
    """The buckets of one number of sequences and tokens: the furthest state, and all batches."""

    state: GraphState
    batches: int


def places(cells: Iterable[GraphCell]) -> dict[tuple[int, int], Place]:
    """Return the places of a grid by (sequences, tokens)."""
    order = list(SYMBOLS)
    found: dict[tuple[int, int], Place] = {}
    for cell in cells:
        key = (cell.sequences, cell.tokens)
        before = found.get(key, Place(cell.state, 0))
        state = min(before.state, cell.state, key=order.index)
        found[key] = Place(state, before.batches + cell.batches)
    return found


def summary(grid: GraphGrid) -> str:
    """Return the numbers of a grid in a line."""
    batches = grid.hits + grid.captures + grid.eager
    replayed = grid.tokens + grid.padding_tokens
    captured = sum(cell.state == "captured" for cell in grid.cells)
    return (
        f"{batches:,} batches: {grid.hits / max(1, batches):.1%} replayed, {grid.captures:,} "
        f"captured, {grid.eager:,} eager. {captured} graphs, {grid.num_bytes / 1e6:,.0f} MB, "
        f"{grid.evictions:,} evicted, {grid.failures:,} failed. "
        f"{grid.padding_tokens / max(1, replayed):.1%} of replayed tokens are padding."
    )


def print_grids(grids: Sequence[GraphGrid], console: "Console") -> None:
    """Write the grids as text."""
    if not grids:
        console.print("This engine runs no device graphs.", highlight=False)
    for grid in grids:
        console.print(f"{TITLES[grid.runtime]}, graphs up to {grid.max_tokens:,} tokens")
        console.print(summary(grid), highlight=False)
        if grid.cells:
            console.print(_table(grid))
    if any(grid.cells for grid in grids):
        key = "   ".join(f"{SYMBOLS[state]} {text}" for state, text in MEANINGS.items())
        console.print(f"Batches per bucket.  {key}", highlight=False)


def _table(grid: GraphGrid) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found = places(grid.cells)
    columns = sorted({sequences for sequences, _ in found})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tokens \\ sequences", justify="right")
    for sequences in columns:
        table.add_column(str(sequences), justify="right")
    for tokens in sorted({tokens for _, tokens in found}):
        row = [found.get((sequences, tokens)) for sequences in columns]
        cells = [
            Text(f"{SYMBOLS[p.state]} {p.batches:,}", STYLES[p.state]) if p else "" for p in row
        ]
        table.add_row(f"{tokens:,}", *cells)
    return table


def draw_grids(grids: Sequence[GraphGrid], path: Path) -> None:
    """Write the grids as a picture; the end of the file's name says which kind.

    Raises:
        ValueError: there is no grid, matplotlib is missing, or it does not know the kind.
    """
    if not grids:
        raise ValueError("this engine runs no device graphs: there is nothing to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 1 + 4 * len(grids)), layout="constrained")
    for grid, axes in zip(grids, figure.subplots(len(grids), squeeze=False)[:, 0], strict=True):
        draw_grid(grid, axes)
    figure.savefig(path, dpi=150)


def draw_grid(grid: GraphGrid, axes: "Axes") -> None:
    """Draw one grid."""
    from matplotlib.patches import Patch, Rectangle

    found = places(grid.cells)
    columns = sorted({sequences for sequences, _ in found})
    rows = sorted({tokens for _, tokens in found})
    for (sequences, tokens), place in found.items():
        x, y = columns.index(sequences), rows.index(tokens)
        colour = COLOURS[place.state]
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
        axes.text(x, y, f"{place.batches:,}", ha="center", va="center", fontsize=7)
    axes.set_xlim(-0.5, max(1, len(columns)) - 0.5)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [str(n) for n in columns])
    axes.set_yticks(range(len(rows)), [f"{n:,}" for n in rows])
    axes.set_xlabel("sequences of the bucket")
    axes.set_ylabel("tokens of the bucket")
    axes.set_title(f"{TITLES[grid.runtime]}: batches per bucket", fontsize=10)
    keys = [Patch(color=COLOURS[state], label=text) for state, text in MEANINGS.items()]
    axes.legend(handles=keys, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
