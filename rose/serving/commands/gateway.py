"""`rose gateway`."""

from typing import Annotated

import typer

from rose.serving.commands.flags import GatewayFlags, LogFlags, spread
from rose.serving.commands.options import ApiKeyFile, ApiKeys, Host, Port


@spread
def gateway(
    engines: Annotated[
        list[str],
        typer.Option(
            "--engine",
            help="Address of an engine, or NAME=ADDRESS; repeatable. Engines of one name are "
            "replicas.",
            metavar="ADDRESS",
        ),
    ],
    gateway: GatewayFlags,
    logs: LogFlags,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    listen_fd: Annotated[
        int | None, typer.Option(help="A listening socket of the parent process.", hidden=True)
    ] = None,
    api_key: ApiKeys = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Run the HTTP gateway alone, in front of engines that run already or will."""
    import logging
    import socket

    from rose.serving.commands.keys import read_keys
    from rose.serving.gateway.server import run_gateway
    from rose.serving.process import (
        die_with_parent,
        is_open_to_others,
        listen,
        set_up_logging,
    )

    die_with_parent()
    set_up_logging(logs.log_level, "gateway", logs.log_format)
    settings = gateway.settings(read_keys(api_key, api_key_file))
    listener = listen(host, port) if listen_fd is None else socket.socket(fileno=listen_fd)
    if not settings.api_keys and is_open_to_others(listener):
        message = "everybody who can reach port %d is let in; --api-key-file asks for a key"
        logging.getLogger(__name__).warning(message, listener.getsockname()[1])
    with listener:
        run_gateway(engines, settings, listener)
