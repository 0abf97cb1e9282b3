"""`rose gateway`."""

from typing import Annotated

import typer

from rose.serving.commands.options import ApiKeys, Host, LogLevel, Port


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
    import socket

    from rose.serving.gateway.server import run_gateway
    from rose.serving.gateway.settings import GatewaySettings
    from rose.serving.process import die_with_parent, listen, set_up_logging

    die_with_parent()
    set_up_logging(log_level, "gateway")
    settings = GatewaySettings(api_keys=tuple(api_key or ()))
    listener = listen(host, port) if listen_fd is None else socket.socket(fileno=listen_fd)
    run_gateway(engines, settings, listener)
