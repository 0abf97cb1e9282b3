"""`rose gateway`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rose.serving.commands.flags import GatewayFlags, LogFlags, TlsFlags, spread
from rose.serving.commands.options import ApiKeyFile, ApiKeys, Host, KeysFolder, Port

if TYPE_CHECKING:
    from rose.serving.gateway.workers import Workers


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
    tls: TlsFlags,
    logs: LogFlags,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    listen_fd: Annotated[
        int | None, typer.Option(help="A listening socket of the parent process.", hidden=True)
    ] = None,
    worker: Annotated[
        str | None, typer.Option(help="NUMBER/COUNT/FOLDER of gateways.", hidden=True)
    ] = None,
    keys: KeysFolder = None,
    api_key: ApiKeys = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Run the HTTP gateway alone, in front of engines that run already or will."""
    import logging
    import socket

    from rose.serving.commands.keys import read_keys
    from rose.serving.curve import read_keys as read_curve_keys
    from rose.serving.gateway.server import Door, run_gateway
    from rose.serving.gateway.unigram.encoder import is_wanted
    from rose.serving.process import (
        die_with_parent,
        is_open_to_others,
        listen,
        raise_file_limit,
    )

    die_with_parent()
    is_wanted()  # a wrong setting ends here, and not with the first request
    logs.set_up(f"gateway {worker.partition('/')[0]}" if worker else "gateway")
    raise_file_limit()
    settings = gateway.settings(read_keys(api_key, api_key_file))
    files = tls.files()
    curve = read_curve_keys(keys, "gateway") if keys else None
    listener = listen(host, port) if listen_fd is None else socket.socket(fileno=listen_fd)
    if not settings.api_keys and is_open_to_others(listener):
        message = "everybody who can reach port %d is let in; --api-key-file asks for a key"
        logging.getLogger(__name__).warning(message, listener.getsockname()[1])
    with listener:
        workers = _workers(worker, tls=files is not None)
        door = Door(
            listener=listener,
            tls=files,
            workers=workers,
            from_workers=workers.listen() if workers else None,
        )
        run_gateway(engines, settings, door, curve)


def _workers(text: str | None, *, tls: bool) -> "Workers | None":
    """Read what the supervisor says of the gateways that share the port."""
    from rose.serving.gateway.workers import Workers

    if text is None:
        return None
    own, count, folder = text.split("/", 2)
    return Workers(Path(folder), int(count), int(own), tls)
