"""The engine process: loads a model, binds its socket, and serves until a signal asks to stop."""

import asyncio
import logging
from collections.abc import Sequence

import uvloop
import zmq.asyncio

from rose.runtime.build import ModelOptions, ServedModel, build
from rose.serving.curve import Doorkeeper, Keys
from rose.serving.engine import EngineServer
from rose.serving.process import freeze_heap, stop_event
from rose.serving.transport import bind_router, bound_address, takes_keys

log = logging.getLogger(__name__)

LAST_WORDS_MS = 2000  # time for the last answers to leave the socket


def run_engine(options: ModelOptions, address: str, keys: Keys | None = None) -> None:
    """Load a model, serve it at `address`, and return once a signal asked to stop.

    Clients can connect from the start; they are welcomed once the model is loaded. With keys only
    gateways that have theirs may.

    Raises:
        ValueError: the model, an option or the address cannot be used.
        EngineFailedError: the engine cannot go on.
    """
    context = zmq.asyncio.Context()
    doors: list[Doorkeeper] = []

    def guard(socket: "zmq.asyncio.Socket") -> None:
        assert keys is not None
        doors.append(Doorkeeper(context, socket, keys))

    socket = bind_router(context, address, guard if keys and takes_keys(address) else None)
    try:
        served = build(options)
        freeze_heap()
        uvloop.run(_serve(served, socket, doors))
        served.close()  # not after a failure: it would wait for a step that may hang
    finally:
        context.destroy(linger=0)


async def _serve(
    served: ServedModel, socket: "zmq.asyncio.Socket", doors: Sequence[Doorkeeper] = ()
) -> None:
    stop = stop_event()
    guarding = [asyncio.create_task(door.run()) for door in doors]
    serving = asyncio.create_task(EngineServer(socket, served).run(stop))
    tasks = [serving, *guarding]
    try:
        log.info("ready at %s", bound_address(socket))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # a door without a keeper would let nobody in any more
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for door in doors:
            door.close()
        socket.close(linger=LAST_WORDS_MS)
    log.info("stopped")
