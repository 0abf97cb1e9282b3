"""`rose engine`."""

from pathlib import Path
from typing import Annotated

import typer

from rose.serving.commands.flags import EngineFlags, LogFlags, spread
from rose.serving.commands.options import KeysFolder, Model


@spread
def engine(
    model: Model,
    engine: EngineFlags,
    logs: LogFlags,
    bind: Annotated[
        str,
        typer.Option(
            help="ipc://PATH or tcp://HOST:PORT; beyond 127.0.0.1 with --keys only.",
            metavar="ADDRESS",
        ),
    ],
    keys: KeysFolder = None,
    name: Annotated[
        str | None, typer.Option(help="Name for clients.", show_default="the folder's")
    ] = None,
) -> None:
    """Run one engine alone; a gateway connects to the address that it binds."""
    from rose.serving.process import die_with_parent, leave_on_stop_signals

    leave_on_stop_signals()
    die_with_parent()
    logs.set_up(f"engine {name or Path(model).resolve().name}")

    from rose.serving.curve import read_keys  # these take seconds
    from rose.serving.engine_process import run_engine

    options = engine.model_options(model, name)
    run_engine(options, bind, read_keys(keys, "engine") if keys else None)
