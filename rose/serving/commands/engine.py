"""`rose engine`."""

from typing import Annotated

import typer

from rose.serving.commands.flags import EngineFlags, LogFlags, spread
from rose.serving.commands.options import Model


@spread
def engine(
    model: Model,
    engine: EngineFlags,
    logs: LogFlags,
    bind: Annotated[
        str, typer.Option(help="ipc://PATH or tcp://127.0.0.1:PORT.", metavar="ADDRESS")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name for clients.", show_default="the folder's")
    ] = None,
) -> None:
    """Run one engine alone; a gateway connects to the address that it binds."""
    from rose.serving.engine import run_engine
    from rose.serving.process import die_with_parent, set_up_logging

    die_with_parent()
    set_up_logging(logs.log_level, f"engine {name or model}", logs.log_format)
    run_engine(engine.model_options(model, name), bind)
