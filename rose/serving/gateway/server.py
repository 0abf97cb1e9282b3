"""The gateway's process: the HTTP server, and a client for each engine."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

import uvicorn
import uvloop
import zmq.asyncio
from starlette.applications import Starlette

from rose.serving.client import EngineClient
from rose.serving.gateway.app import create_app
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.process import stop_event

log = logging.getLogger(__name__)

DRAIN_LIMIT_S = 20


def run_gateway(engines: Sequence[str], settings: GatewaySettings, listener: socket.socket) -> None:
    """Serve until a signal asks to stop, then finish running requests and return.

    Args:
        engines: addresses, or NAME=ADDRESS; without a name it is the one that the engine gives,
            and the gateway waits for that engine before it listens.
        settings: of the gateway.
        listener: a bound socket, see `rose.serving.process.listen`.

    Raises:
        ValueError: an address cannot be used, or two engines have one name.
    """
    uvloop.run(_serve(engines, settings, listener))


async def _serve(
    engines: Sequence[str], settings: GatewaySettings, listener: socket.socket
) -> None:
    stop = stop_event()
    context = zmq.asyncio.Context()
    clients: dict[str, EngineClient] = {}
    try:
        for engine in engines:
            name, client = await _connect(context, engine)
            if name in clients:
                raise ValueError(f"two engines serve a model called {name!r}; use NAME=ADDRESS")
            clients[name] = client
        await _serve_http(create_app(clients, settings), listener, stop)
    finally:
        for client in clients.values():
            await client.close()
        context.destroy(linger=0)


async def _connect(context: zmq.asyncio.Context, engine: str) -> tuple[str, EngineClient]:
    name, separator, address = engine.partition("=")
    client = EngineClient(context, address if separator else engine)
    client.start()
    if separator:
        return name, client
    log.info("waiting for the engine at %s", engine)
    await client.wait_ready()
    assert client.card is not None
    return client.card.name, client


async def _serve_http(app: Starlette, listener: socket.socket, stop: asyncio.Event) -> None:
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_LIMIT_S,
        timeout_keep_alive=75,
        backlog=2048,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.should_exit = True
    await serving


class _Server(uvicorn.Server):
    """A server that leaves the signals to this module."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()
