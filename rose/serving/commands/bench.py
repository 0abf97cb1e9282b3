"""`rose bench`: the commands that measure."""

import typer

from rose.serving.commands.bench_attention import attention

bench = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
bench.command()(attention)


@bench.callback()
def root() -> None:
    """Measure what a model does on this machine."""
