"""`rose keys`."""

from pathlib import Path
from typing import Annotated

import typer


def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them.", metavar="FOLDER")],
) -> None:
    """Make keys for engines and gateways on different machines.

    An engine needs engine.secret, engine.key and gateway.key; a gateway needs
    gateway.secret, gateway.key and engine.key. Copy them by a safe way, then:

    [bold]rose engine MODEL --bind tcp://0.0.0.0:5555 --keys FOLDER[/bold]
    [bold]rose gateway --engine tcp://HOST:5555 --keys FOLDER[/bold]
    """
    from rose.serving.curve import make_keys

    for path in make_keys(folder):
        typer.echo(path)
