"""`rose inspect`."""

from typing import Annotated

import typer

from rose.serving.commands.options import MaxModelLen, Model, Tasks, parse_tasks


def inspect(
    model: Model,
    task: Tasks = None,
    max_model_len: MaxModelLen = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for machines.")] = False,
) -> None:
    """Show what is read from a checkpoint, where from, and what becomes of it.

    Nothing is loaded, so this is quick. A folder that cannot be served ends
    with exit code 1 and the reason. For example:

    [bold]rose inspect ./all-MiniLM-L6-v2[/bold]
    """
    from rich.console import Console

    from rose.serving import inspect as report_module

    report = report_module.inspect_checkpoint(
        model, max_model_len=max_model_len, tasks=parse_tasks(task)
    )
    if as_json:
        typer.echo(report_module.as_json(report))
    else:
        report_module.print_report(report, Console())
