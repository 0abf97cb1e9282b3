"""`rose bench latency`, `scoring`, `throughput`, `concurrency` and `decode`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rose.serving.commands.flags import EngineFlags, spread
from rose.serving.commands.options import Model

if TYPE_CHECKING:
    from rose.serving.bench.results import Results

WIDE = 160  # columns of a table in a file

Url = Annotated[
    str | None,
    typer.Option(help="A running server of the same model."),
]
ServedName = Annotated[
    str | None,
    typer.Option(help="Its name of the model.", show_default="its first"),
]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Another OpenAI-compatible server of the same model: it gets the same load, in turns.",
    ),
]
CompareName = Annotated[
    str | None,
    typer.Option(help="Its name of the model.", show_default="its first"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="ROSE_API_KEY", help="Bearer key for both."),
]
Seconds = Annotated[float, typer.Option(min=0, help="Seconds per load, at least seven turns.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny loads: does it work at all?")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="NAME",
        help="Write NAME.json and, where matplotlib is, the picture NAME.png.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """Servers"""  # noqa: D415 - the title of its part of --help

    url: Url = None
    served_name: ServedName = None
    compare: Compare = None
    compare_name: CompareName = None
    api_key: ApiKey = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringFlags:
    """Measuring"""  # noqa: D415 - the title of its part of --help

    seconds: Seconds = 10.0
    quick: Quick = False
    output: Output = None


@spread
def latency(
    model: Model,
    engine: EngineFlags,
    servers: ServerFlags,
    measuring: MeasuringFlags,
) -> None:
    """Time single texts of 128, 512 and 4,096 token ids, one after another.

    In process, and with --url over HTTP beside it: what a server adds.

    [bold]rose bench latency ./all-MiniLM-L6-v2 --url http://127.0.0.1:8000[/bold]
    """
    _run("latency", model, engine, servers, measuring)


@spread
def scoring(
    model: Model,
    engine: EngineFlags,
    servers: ServerFlags,
    measuring: MeasuringFlags,
) -> None:
    """Time batches of 5, 25 and 50 texts of 512 token ids, one after another."""
    _run("scoring", model, engine, servers, measuring)


@spread
def throughput(
    model: Model,
    engine: EngineFlags,
    servers: ServerFlags,
    measuring: MeasuringFlags,
) -> None:
    """Count texts a second: 4 clients, each with batches of 100 texts of token ids."""
    _run("throughput", model, engine, servers, measuring)


@spread
def concurrency(
    model: Model,
    engine: EngineFlags,
    servers: ServerFlags,
    measuring: MeasuringFlags,
) -> None:
    """Time texts of 512 tokens over HTTP, from 1 to 16 clients at a time.

    Tokenisation and network are part of it. Without --url a server is started
    for as long as it takes.
    """
    _run("concurrency", model, engine, servers, measuring)


@spread
def decode(
    model: Model,
    engine: EngineFlags,
    servers: ServerFlags,
    measuring: MeasuringFlags,
) -> None:
    """Time greedy generation: 1, 8 and 32 streams of 64 prompt and 64 new tokens."""
    _run("decode", model, engine, servers, measuring)


def _run(
    name: str, model: str, engine: EngineFlags, servers: ServerFlags, measuring: MeasuringFlags
) -> None:
    """Measure, print, write, and end with code 1 where answers do not agree."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    from rose.serving.bench.results import print_results
    from rose.serving.bench.run import Options, run
    from rose.serving.process import set_up_logging

    set_up_logging("warning", f"bench {name}")
    options = Options(
        bench=name,
        model=model,
        engine=engine,
        url=servers.url,
        served_name=servers.served_name,
        compare=servers.compare,
        compare_name=servers.compare_name,
        api_key=servers.api_key,
        seconds=measuring.seconds,
        quick=measuring.quick,
    )
    errors = Console(stderr=True)
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=errors, transient=True
    ) as bar:
        task = bar.add_task("")
        results = run(options, lambda text: bar.update(task, description=text))
    screen = Console()
    print_results(results, screen if screen.is_terminal else Console(width=WIDE))
    if measuring.output is not None:
        _write(results, measuring.output)
    if not results.kept:
        typer.echo(
            "error: the answers do not agree, so these speeds are not of the same work", err=True
        )
        raise typer.Exit(1)


def _write(results: "Results", output: Path) -> None:
    from importlib.util import find_spec

    from rose.serving.bench.results import draw, write_json

    written = output.with_name(f"{output.name}.json")
    write_json(results, written)
    typer.echo(f"wrote {written}")
    if find_spec("matplotlib") is None:
        typer.echo("no picture: pip install 'rose-engine[bench]'", err=True)
        return
    picture = output.with_name(f"{output.name}.png")
    draw(results, picture)
    typer.echo(f"wrote {picture}")
