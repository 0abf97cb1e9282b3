"""`rose gateway`."""

from typing import Annotated

import typer

from rose.serving.commands.options import (
    ApiKeys,
    Host,
    LogLevel,
    Port,
    RequestTimeout,
    StrictDimensions,
    Truncate,
)


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
    truncate: Truncate = False,
    strict_dimensions: StrictDimensions = False,
    request_timeout: RequestTimeout = 600.0,
    log_level: LogLevel = "info",
) -> None:
    """Run the HTTP gateway alone, in front of engines that run already or will."""
    import socket

    from rose.serving.gateway.server import run_gateway
    from rose.serving.gateway.settings import GatewaySettings
    from rose.serving.process import die_with_parent, listen, set_up_logging

    die_with_parent()
    set_up_logging(log_level, "gateway")
    settings = GatewaySettings(
        api_keys=tuple(api_key or ()),
        truncate=truncate,
        strict_dimensions=strict_dimensions,
        request_timeout_s=request_timeout,
    )
    listener = listen(host, port) if listen_fd is None else socket.socket(fileno=listen_fd)
    with listener:
        run_gateway(engines, settings, listener)
