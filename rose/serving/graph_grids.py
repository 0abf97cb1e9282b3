"""The device graphs of an engine, from its caches over the wire to whoever asks. Free of torch."""

import asyncio
from typing import TYPE_CHECKING, Any, cast

import zmq.asyncio

from rose.serving import protocol
from rose.serving.curve import Keys
from rose.serving.protocol import (
    PROTOCOL_VERSION,
    GraphCell,
    GraphGrid,
    GraphRuntime,
    GraphsRequest,
    GraphsResult,
    Hello,
    Refused,
    Welcome,
)
from rose.serving.transport import check_peer, make_dealer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rose.runtime.graphs import GraphCache

TIMEOUT_S = 5.0


def graph_counts(caches: "Iterable[GraphCache[Any, Any]]") -> dict[str, int]:
    """Return what `Stats` tells of graphs, summed over an engine's caches."""
    counters = [cache.counters for cache in caches]
    return {
        "graph_hits": sum(c.hits for c in counters),
        "graph_captures": sum(c.captures for c in counters),
        "graph_evictions": sum(c.evictions for c in counters),
        "padding_tokens": sum(c.padding_tokens for c in counters),
    }


def graph_grids(caches: "Mapping[str, GraphCache[Any, Any]]") -> list[GraphGrid]:
    """Return the buckets of an engine's caches."""
    return [_grid(cast("GraphRuntime", name), cache) for name, cache in caches.items()]


def _grid(name: GraphRuntime, cache: "GraphCache[Any, Any]") -> GraphGrid:
    counters = cache.counters
    return GraphGrid(
        runtime=name,
        max_tokens=cache.policy.max_tokens,
        num_bytes=cache.num_bytes,
        hits=counters.hits,
        captures=counters.captures,
        evictions=counters.evictions,
        failures=counters.failures,
        eager=counters.eager,
        tokens=counters.tokens,
        padding_tokens=counters.padding_tokens,
        cells=[
            GraphCell(*entry.key, entry.state.value, entry.batches) for entry in cache.snapshot()
        ],
    )


async def fetch_grids(
    address: str, timeout_s: float = TIMEOUT_S, keys: Keys | None = None
) -> list[GraphGrid]:
    """Ask the engine at an address for its device graphs, with a gateway's keys if it has some.

    Raises:
        ValueError: the address cannot be used, or no engine of this version answers there.
    """
    context = zmq.asyncio.Context()
    try:
        socket = make_dealer(context, check_peer(address, keyed=keys is not None), keys)
        socket.connect(address)
        async with asyncio.timeout(timeout_s):
            return await _ask(socket)
    except TimeoutError:
        raise ValueError(f"no engine answers at {address} within {timeout_s:g} seconds") from None
    finally:
        context.destroy(linger=0)


async def _ask(socket: "zmq.asyncio.Socket") -> list[GraphGrid]:
    await socket.send_multipart([protocol.encode(Hello(PROTOCOL_VERSION, "inspect"))])
    while True:
        header, *_ = await socket.recv_multipart()
        message = protocol.decode_from_engine(header)
        if isinstance(message, Refused):
            raise ValueError(f"the engine refused: {message.reason}")
        if isinstance(message, Welcome):
            await socket.send_multipart([protocol.encode(GraphsRequest())])
        if isinstance(message, GraphsResult):
            return message.grids
