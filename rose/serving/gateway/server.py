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
from rose.serving.process import beat, stop_event
from rose.serving.replicas import ReplicaSet

log = logging.getLogger(__name__)

DRAIN_LIMIT_S = 20


def run_gateway(engines: Sequence[str], settings: GatewaySettings, listener: socket.socket) -> None:
    """Serve until a signal asks to stop, then finish running requests and return.

    Args:
        engines: addresses, or NAME=ADDRESS; engines of one name are replicas. Without a name it is
            the one that the engine gives, and the gateway waits for that engine before it listens.
        settings: of the gateway.
        listener: a bound socket, see `rose.serving.process.listen`.

    Raises:
        ValueError: an address cannot be used.
    """
    uvloop.run(_serve(engines, settings, listener))


async def _serve(
    engines: Sequence[str], settings: GatewaySettings, listener: socket.socket
) -> None:
    stop = stop_event()
    beating = asyncio.create_task(beat())
    context = zmq.asyncio.Context()
    clients: list[EngineClient] = []
    try:
        models: dict[str, list[EngineClient]] = {}
        for engine in engines:
            name, separator, address = engine.partition("=")
            client = EngineClient(context, address if separator else engine)
            client.start()
            clients.append(client)
            models.setdefault(name if separator else await _ask_name(client), []).append(client)
        sets = {name: ReplicaSet(replicas) for name, replicas in models.items()}
        await _serve_http(create_app(sets, settings), listener, stop)
    finally:
        beating.cancel()
        for client in clients:
            await client.close()
        context.destroy(linger=0)


async def _ask_name(client: EngineClient) -> str:
    log.info("waiting for the engine at %s", client.address)
    await client.wait_ready()
    assert client.card is not None
    return client.card.name


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
