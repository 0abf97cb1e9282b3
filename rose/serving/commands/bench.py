"""`rose bench`: the commands that measure."""

import typer

from rose.serving.commands.bench_attention import attention
from rose.serving.commands.bench_speed import concurrency, decode, latency, scoring, throughput

bench = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
for command in (latency, scoring, throughput, concurrency, decode, attention):
    bench.command()(command)


@bench.callback()
def root() -> None:
    """Measure what a model does on this machine."""
