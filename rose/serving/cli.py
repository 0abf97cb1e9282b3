"""The command line. Each command imports what it needs when it runs: `--help` is instant."""

import logging
import socket
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rose._version import __version__
from rose.serving.process import listen
from rose.serving.supervisor import ChildFailedError, Supervisor, parse_models

app = typer.Typer(
    name="rose",
    help="ROSE, a Runtime-Optimized Serving Engine: serve LLMs, embedders and rerankers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Model = Annotated[str, typer.Argument(help="A model folder.", metavar="MODEL")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Attention = Annotated[str, typer.Option(help="Attention back end, or auto.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest input in tokens.", show_default="as the checkpoint says")
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per batch.", show_default="measured at start-up"),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bit-equal vectors whatever else is in the batch.")
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
Host = Annotated[str, typer.Option(help="Interface to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option("--api-key", envvar="ROSE_API_KEY", help="Bearer key to ask for; repeatable."),
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Handle the options that go before a command."""
    if version:
        typer.echo(f"rose {__version__}")
        raise typer.Exit


@app.command()
def serve(
    models: Annotated[
        list[str],
        typer.Argument(help="Model folders; NAME=PATH sets the name.", metavar="MODEL..."),
    ],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    attention: Attention = "auto",
    max_model_len: MaxModelLen = None,
    max_batch_tokens: MaxBatchTokens = None,
    deterministic: Deterministic = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve models over HTTP: one engine per model and a gateway, as one process tree."""
    from rose.serving.process import set_up_logging

    set_up_logging(log_level, "serve")
    supervisor = Supervisor(
        parse_models(models),
        host=host,
        port=port,
        engine_options=_as_options(
            device=device,
            dtype=dtype,
            attention=attention,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            deterministic=deterministic,
            log_level=log_level,
        ),
        gateway_options=_as_options(log_level=log_level),
        secrets={"ROSE_API_KEY": " ".join(api_key or ())},
    )
    raise typer.Exit(supervisor.run())


@app.command()
def engine(
    model: Model,
    bind: Annotated[str, typer.Option(help="ipc://PATH or tcp://127.0.0.1:PORT.")],
    name: Annotated[
        str | None, typer.Option(help="Name for clients.", show_default="the folder's")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    attention: Attention = "auto",
    max_model_len: MaxModelLen = None,
    max_batch_tokens: MaxBatchTokens = None,
    deterministic: Deterministic = False,
    log_level: LogLevel = "info",
) -> None:
    """Run one engine alone; a gateway connects to the address that it binds."""
    from rose.runtime.build import ModelOptions
    from rose.serving.engine import run_engine
    from rose.serving.process import die_with_parent, set_up_logging

    die_with_parent()
    set_up_logging(log_level, f"engine {name or model}")
    options = ModelOptions(
        path=model,
        name=name,
        device=device,
        dtype=dtype,
        attention=attention,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        deterministic=deterministic,
    )
    run_engine(options, bind)


@app.command()
def gateway(
    engines: Annotated[
        list[str], typer.Option("--engine", help="Address of an engine; repeatable.")
    ],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    listen_fd: Annotated[
        int | None, typer.Option(help="A listening socket of the parent process.", hidden=True)
    ] = None,
    api_key: ApiKeys = None,
    log_level: LogLevel = "info",
) -> None:
    """Run the HTTP gateway alone, in front of engines that run already or will."""
    from rose.serving.gateway.server import run_gateway
    from rose.serving.gateway.settings import GatewaySettings
    from rose.serving.process import die_with_parent, set_up_logging

    die_with_parent()
    set_up_logging(log_level, "gateway")
    settings = GatewaySettings(api_keys=tuple(api_key or ()))
    listener = listen(host, port) if listen_fd is None else socket.socket(fileno=listen_fd)
    run_gateway(engines, settings, listener)


def _as_options(**values: object) -> list[str]:
    """Write values as command-line options, for a child process; None and False are left out."""
    options: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        options.append(f"--{name.replace('_', '-')}")
        if value is not True:
            options.append(str(value))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what a user can get wrong ends with one line and exit code 1."""
    try:
        app(list(arguments) if arguments is not None else None)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, ChildFailedError) as error:
        logging.getLogger(__name__).debug("the error in full", exc_info=True)
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
