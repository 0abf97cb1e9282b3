"""The gateway's process: the HTTP server, and a client for each engine."""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Sequence

import uvicorn
import uvloop
import zmq.asyncio
from starlette.applications import Starlette

from rose.serving.client import EngineClient
from rose.serving.gateway.app import create_app
from rose.serving.gateway.http_protocol import HttpProtocol
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.process import beat, stop_event
from rose.serving.replicas import ReplicaSet
from rose.serving.transport import check_peer

log = logging.getLogger(__name__)

DRAIN_LIMIT_S = 60
LAST_WORDS_S = 5.0  # for telling clients that their request is cut off

NamedAddress = tuple[str | None, str]


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
    uvloop.run(_serve([parse_engine(engine) for engine in engines], settings, listener))


async def _serve(
    engines: Sequence[NamedAddress], settings: GatewaySettings, listener: socket.socket
) -> None:
    stop = stop_event()
    context = zmq.asyncio.Context()
    named = [(name, EngineClient(context, address)) for name, address in engines]
    clients = [client for _, client in named]
    for client in clients:
        client.start()
    serving = asyncio.create_task(_serve_models(named, settings, listener, stop))
    watching = [asyncio.create_task(beat()), *[asyncio.create_task(c.watch()) for c in clients]]
    try:
        await asyncio.wait([serving, *watching], return_when=asyncio.FIRST_COMPLETED)
        for task in (*watching, serving):
            if task.done():
                task.result()  # what only watches ends by an error alone
    finally:
        for task in (serving, *watching):
            task.cancel()
        await asyncio.gather(serving, *watching, return_exceptions=True)
        for client in clients:
            await client.close()
        context.destroy(linger=0)


def parse_engine(argument: str) -> NamedAddress:
    """Read NAME=ADDRESS, or an address alone.

    Raises:
        ValueError: the address cannot be used.
    """
    found = re.fullmatch(r"(?:(.+)=)?(\w+://.*)", argument)
    return (found[1], check_peer(found[2])) if found else (None, check_peer(argument))


async def _serve_models(
    named: Sequence[tuple[str | None, EngineClient]],
    settings: GatewaySettings,
    listener: socket.socket,
    stop: asyncio.Event,
) -> None:
    models: dict[str, list[EngineClient]] = {}
    for name, client in named:
        name = name or await _ask_name(client, stop)
        if name is None:
            return
        models.setdefault(name, []).append(client)
    sets = {name: ReplicaSet(replicas) for name, replicas in models.items()}
    await _serve_http(create_app(sets, settings), listener, stop)


async def _ask_name(client: EngineClient, stop: asyncio.Event) -> str | None:
    """Wait for an engine and return its name; None if it is time to stop."""
    log.info("waiting for the engine at %s", client.address)
    waits = [asyncio.create_task(client.wait_ready()), asyncio.create_task(stop.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return client.card.name if client.card is not None else None


async def _serve_http(app: Starlette, listener: socket.socket, stop: asyncio.Event) -> None:
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
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
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=LAST_WORDS_S)


class _Server(uvicorn.Server):
    """A server that leaves the signals to this module."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()
