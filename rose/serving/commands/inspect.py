"""`rose inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from rose.serving.commands.options import (
    KeysFolder,
    MaxModelLen,
    Quantization,
    Tasks,
    parse_tasks,
)


def inspect(
    model: Annotated[
        str | None, typer.Argument(help="A model folder.", metavar="MODEL", show_default=False)
    ] = None,
    task: Tasks = None,
    max_model_len: MaxModelLen = None,
    quantization: Quantization = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for machines.")] = False,
    graphs: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Show the device graphs of the engine that runs there instead.",
            show_default=False,
        ),
    ] = None,
    keys: KeysFolder = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --graphs: draw them too, as .png or .svg.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what is read from a checkpoint, where from, and what becomes of it.

    No weights are loaded, so this is quick: their names, shapes and types are
    compared with what the model needs. A folder that cannot be served ends
    with exit code 1 and the reason. For example:

    [bold]rose inspect ./all-MiniLM-L6-v2[/bold]
    """
    if (model is None) == (graphs is None):
        raise ValueError("give either a model folder, or --graphs and the address of an engine")
    if model is not None:
        _show_checkpoint(model, task, max_model_len, quantization, as_json)
    elif graphs is not None:
        _show_graphs(graphs, keys, picture, as_json)


def _show_checkpoint(
    model: str,
    task: str | None,
    max_model_len: int | None,
    quantization: str | None,
    as_json: bool,
) -> None:
    from rich.console import Console

    from rose.serving import inspect as report_module

    report = report_module.inspect_checkpoint(
        model,
        max_model_len=max_model_len,
        tasks=parse_tasks(task),
        quantization=quantization,
    )
    if as_json:
        typer.echo(report_module.as_json(report))
    else:
        report_module.print_report(report, Console())


def _show_graphs(address: str, keys: Path | None, picture: Path | None, as_json: bool) -> None:
    import asyncio

    import msgspec
    from rich.console import Console

    from rose.serving.curve import read_keys
    from rose.serving.graph_grids import fetch_grids
    from rose.serving.graph_picture import draw_grids, print_grids

    grids = asyncio.run(fetch_grids(address, keys=read_keys(keys, "gateway") if keys else None))
    if as_json:
        typer.echo(msgspec.json.encode(grids).decode())
    else:
        print_grids(grids, Console())
    if picture is not None:
        draw_grids(grids, picture)
