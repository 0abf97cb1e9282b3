"""The gateway's process: the HTTP server, and a client for each engine."""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop
import zmq.asyncio
from starlette.applications import Starlette

from rose.serving.client import EngineClient
from rose.serving.curve import Keys
from rose.serving.gateway.app import create_app
from rose.serving.gateway.http_protocol import HttpProtocol
from rose.serving.gateway.models import ModelTable
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.workers import Workers
from rose.serving.process import beat, freeze_heap, stop_event, was_restarted
from rose.serving.replicas import ReplicaSet
from rose.serving.transport import check_peer

log = logging.getLogger(__name__)

DRAIN_LIMIT_S = 60
SETTLE_LIMIT_S = 5.0
LAST_WORDS_S = 5.0  # for telling clients that their request is cut off

NamedAddress = tuple[str | None, str]
NamedClient = tuple[str | None, EngineClient]


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """How a gateway is reached.

    Attributes:
        listener: A bound socket, see `rose.serving.process.listen`.
        tls: Files of the certificate (with its chain) and of its key; None is plain HTTP.
        workers: The gateways that share the port, if there are several.
        from_workers: What the others ask this one by, see `Workers.listen`.
    """

    listener: socket.socket
    tls: tuple[Path, Path] | None = None
    workers: Workers | None = None
    from_workers: socket.socket | None = None


def run_gateway(
    engines: Sequence[str], settings: GatewaySettings, door: Door, keys: Keys | None = None
) -> None:
    """Serve until a signal asks to stop, then finish running requests and return.

    Args:
        engines: addresses, or NAME=ADDRESS; engines of one name are replicas. Without a name it is
            the one that the engine gives, and the gateway waits for that engine before it listens.
        settings: of the gateway.
        door: how it is reached.
        keys: of the connections to engines over tcp.

    Raises:
        ValueError: an address cannot be used.
    """
    named = [parse_engine(engine, keyed=keys is not None) for engine in engines]
    uvloop.run(_serve(named, settings, door, keys))


async def _serve(
    engines: Sequence[NamedAddress], settings: GatewaySettings, door: Door, keys: Keys | None
) -> None:
    stop = stop_event()
    context = zmq.asyncio.Context()
    named = [(name, EngineClient(context, address, keys)) for name, address in engines]
    clients = [client for _, client in named]
    for client in clients:
        client.start()
    serving = asyncio.create_task(_serve_models(named, settings, door, stop))
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


def parse_engine(argument: str, *, keyed: bool = False) -> NamedAddress:
    """Read NAME=ADDRESS, or an address alone.

    Raises:
        ValueError: the address cannot be used.
    """
    found = re.fullmatch(r"(?:(.+)=)?(\w+://.*)", argument)
    name, address = (found[1], found[2]) if found else (None, argument)
    return name, check_peer(address, keyed=keyed)


async def _serve_models(
    named: Sequence[NamedClient],
    settings: GatewaySettings,
    door: Door,
    stop: asyncio.Event,
) -> None:
    sets: dict[str, ReplicaSet] = {}
    table = ModelTable({})
    for name, client in named:
        if name is None:
            table.unnamed[client.address] = client
        else:
            _enlist(name, client, sets, table)
    naming = [
        asyncio.create_task(_learn_name(client, sets, table))
        for name, client in named
        if name is None
    ]
    try:
        if was_restarted():
            await _settle([client for _, client in named])
        app = create_app(table, settings, door.workers)
        freeze_heap()
        await _serve_http(app, door, stop)
    finally:
        for task in naming:
            task.cancel()
        await asyncio.gather(*naming, return_exceptions=True)


async def _settle(clients: Sequence[EngineClient]) -> None:
    """Let connections wait for engines that were there before this gateway: they answer soon."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_LIMIT_S):
            await asyncio.gather(*(client.wait_ready() for client in clients))


def _enlist(
    name: str, client: EngineClient, sets: dict[str, ReplicaSet], table: ModelTable
) -> None:
    """Serve an engine as a model, or as one more replica of one."""
    if name in sets:
        sets[name].add(client)
    else:
        sets[name] = ReplicaSet([client])
        table.add(name, sets[name])


async def _learn_name(client: EngineClient, sets: dict[str, ReplicaSet], table: ModelTable) -> None:
    """Wait for an engine and serve it under the name that it gives."""
    log.info("waiting for the engine at %s", client.address)
    await client.wait_ready()
    assert client.card is not None
    _enlist(client.card.name, client, sets, table)
    del table.unnamed[client.address]


async def _serve_http(app: Starlette, door: Door, stop: asyncio.Event) -> None:
    certificate, key = door.tls or (None, None)
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing asks where a client is
        timeout_graceful_shutdown=DRAIN_LIMIT_S,
        timeout_keep_alive=75,
        backlog=2048,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    server = _Server(config)
    listeners = [door.listener, *([door.from_workers] if door.from_workers else [])]
    serving = asyncio.create_task(server.serve(sockets=listeners))
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
