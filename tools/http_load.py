"""The cheapest HTTP client there is, so that what is measured is the server."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

_HEAD_END = b"\r\n\r\n"


def post(path: str, body: dict[str, Any]) -> bytes:
    """A request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Connection(asyncio.Protocol):
    """One connection that is kept alive; one request at a time."""

    def __init__(self) -> None:
        """Wait for the transport."""
        self._transport: Any = None  # uvloop's is no asyncio.Transport
        self._received = bytearray()
        self._wanted: int | None = None
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand over the answer once it is whole."""
        self._received += data
        if self._wanted is None and (end := self._received.find(_HEAD_END)) >= 0:
            head = self._received[:end].decode("latin-1").lower()
            length = head.split("content-length:", 1)[1].split("\r\n", 1)[0]
            self._wanted = end + len(_HEAD_END) + int(length)
        if self._wanted is not None and len(self._received) >= self._wanted:
            answer, self._answer = self._answer, None
            content = bytes(self._received)
            self._received.clear()
            self._wanted = None
            assert answer is not None
            answer.set_result(content)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the request that waits."""
        if self._answer is not None:
            self._answer.set_exception(error or ConnectionError("the server hung up"))

    async def ask(self, request: bytes) -> bytes:
        """Send a request and wait for its answer, head and body.

        Raises:
            RuntimeError: the status is not 200.
        """
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        answer = await self._answer
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:500].decode("latin-1"))
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


async def measure(
    port: int, requests: Sequence[bytes], clients: int, seconds: float
) -> tuple[list[float], float]:
    """Send requests in turn over `clients` connections, each waiting for its answers.

    Returns:
        the seconds of each request, and requests a second.
    """
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(clients)
    ]
    taken: list[float] = []
    began = time.perf_counter()

    async def client(number: int, connection: Connection) -> None:
        while time.perf_counter() - began < seconds:
            start = time.perf_counter()
            await connection.ask(requests[(number + len(taken)) % len(requests)])
            taken.append(time.perf_counter() - start)

    await asyncio.gather(*(client(i, connection) for i, connection in enumerate(connections)))
    total = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return taken, len(taken) / total


def median_ms(seconds: Sequence[float]) -> float:
    """The median in milliseconds."""
    return 1e3 * float(np.median(seconds))
