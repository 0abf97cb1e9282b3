"""`rose models`."""

from typing import Annotated

import typer


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for machines.")] = False,
) -> None:
    """List the architectures that can be served.

    The name is model_type in a checkpoint's config.json; rose inspect tells
    what becomes of a checkpoint of yours.
    """
    import json

    from rose.models.registry import ARCHITECTURES
    from rose.models.tasks import possible_tasks

    tasks = {name: possible_tasks(ARCHITECTURES.load(name)) for name in ARCHITECTURES}
    if as_json:
        typer.echo(json.dumps(tasks, indent=2))
        return
    width = max(len("architecture"), *map(len, tasks))
    typer.echo(f"{'architecture':{width}}  tasks")
    for name, can in tasks.items():
        typer.echo(f"{name:{width}}  {', '.join(can)}")
    typer.echo(
        "Each can also be the backbone of a late-interaction model (ColBERT): embed, score; "
        "Qwen3-Next and Qwen3.5 only where queries attend to the tokens that expand them."
    )
