"""`rose serve`."""

from typing import Annotated

import typer

from rose.serving.commands.flags import (
    EngineFlags,
    GatewayFlags,
    LogFlags,
    TlsFlags,
    as_options,
    spread,
)
from rose.serving.commands.options import ApiKeyFile, ApiKeys, Host, Port


@spread
def serve(
    models: Annotated[
        list[str],
        typer.Argument(help="Model folders; NAME=PATH sets the name.", metavar="MODEL..."),
    ],
    engine: EngineFlags,
    gateway: GatewayFlags,
    tls: TlsFlags,
    logs: LogFlags,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    api_key_file: ApiKeyFile = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines per model.")] = 1,
    gateway_workers: Annotated[
        int, typer.Option(min=1, help="Gateways that share the port; limits are those of each.")
    ] = 1,
) -> None:
    """Serve models over HTTP: one engine per model and a gateway, as one process tree."""
    from rose.serving.children import ChildFailedError
    from rose.serving.commands.keys import read_keys
    from rose.serving.process import KEYS_VARIABLE, set_up_logging
    from rose.serving.supervisor import Supervisor, parse_models

    engine.check()
    set_up_logging(logs.log_level, "serve", logs.log_format)
    supervisor = Supervisor(
        parse_models(models),
        host=host,
        port=port,
        replicas=replicas,
        gateway_workers=gateway_workers,
        tls=tls.files() is not None,
        engine_options=as_options(engine, logs),
        gateway_options=as_options(gateway, tls, logs),
        secrets={KEYS_VARIABLE: " ".join(read_keys(api_key, api_key_file))},
    )
    try:
        code = supervisor.run()
    except ChildFailedError as error:
        typer.echo(f"error: {error}", err=True)
        code = 1
    raise typer.Exit(code)
