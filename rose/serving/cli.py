"""The command line. Each command imports what it needs when it runs: `--help` is instant."""

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rose._version import __version__
from rose.serving.commands.bench import bench
from rose.serving.commands.chat import chat
from rose.serving.commands.convert import convert
from rose.serving.commands.curve_keys import keys
from rose.serving.commands.embed import embed
from rose.serving.commands.engine import engine
from rose.serving.commands.gateway import gateway
from rose.serving.commands.generate import generate
from rose.serving.commands.inspect import inspect
from rose.serving.commands.models import models
from rose.serving.commands.rerank import rerank
from rose.serving.commands.serve import serve

app = typer.Typer(
    name="rose",
    help="ROSE, a Runtime-Optimized Serving Engine: serve LLMs, embedders and rerankers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (
    serve,
    engine,
    gateway,
    embed,
    rerank,
    generate,
    chat,
    convert,
    inspect,
    models,
    keys,
):
    app.command()(command)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Handle the options that go before a command."""
    if version:
        typer.echo(f"rose {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what a user can get wrong ends with one line and exit code 1."""
    try:
        app(list(arguments) if arguments is not None else None, prog_name="rose")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError) as error:
        logging.getLogger(__name__).debug("the error in full", exc_info=True)
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
