"""Several gateway processes behind one port: what each has to know of the others.

The system spreads connections over them. Each has a socket file too, by which the others ask it for
its numbers, so that whoever is asked by a client can answer for all.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rose.serving.process import unverified

HEADER = "x-rose-worker"  # marks what a worker asks another
TIMEOUT_S = 1.0
OF_ENGINES = ("rose_engine_", "rose_model_")


class Reply(NamedTuple):
    """What another worker answered."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Workers:
    """The gateways of one port.

    Attributes:
        folder: Of their socket files.
        count: How many there are.
        own: The number of this one, from 0 on.
        tls: Whether they speak TLS.
    """

    folder: Path
    count: int
    own: int
    tls: bool = False

    def listen(self) -> socket.socket:
        """Bind this worker's socket file; it is for this user alone, as the folder is."""
        path = self._path(self.own)
        path.unlink(missing_ok=True)  # of the process that was here before
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        return listener

    async def ask(self, path: str, headers: Mapping[str, str]) -> dict[int, Reply | None]:
        """GET a path from the others; None from those that do not answer in time."""
        others = [number for number in range(self.count) if number != self.own]
        replies = await asyncio.gather(*(self._ask_one(n, path, headers) for n in others))
        return dict(zip(others, replies, strict=True))

    async def _ask_one(self, number: int, path: str, headers: Mapping[str, str]) -> Reply | None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
            async with asyncio.timeout(TIMEOUT_S):
                return await self._get(number, path, headers)
        return None

    async def _get(self, number: int, path: str, headers: Mapping[str, str]) -> Reply:
        where = str(self._path(number))
        if self.tls:
            opening = asyncio.open_unix_connection(where, ssl=unverified(), server_hostname="x")
        else:
            opening = asyncio.open_unix_connection(where)
        reader, writer = await opening
        try:
            lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
            head = f"GET {path} HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n"
            writer.write(f"{head}{HEADER}: {self.own}\r\n{''.join(lines)}\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
        first, _, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: *(\d+)", first.lower())
        if length is None or len(body) != int(length[1]):
            raise ConnectionError("the worker ended while it answered")
        return Reply(int(first.split()[1]), body)

    def _path(self, number: int) -> Path:
        return self.folder / f"gateway-{number}.sock"


def merged(expositions: Mapping[int, bytes], own: int) -> bytes:
    """Put the metrics of several workers into one text.

    What a worker counts itself gets its number as the label `worker`, so that sums over workers
    are right whichever was started again. Of the engines every worker tells the same; a counter is
    the largest that any has seen, as one that was started later may have seen less.
    """
    families: dict[str, Metric] = {}
    of_engines: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for number in sorted(expositions, key=lambda number: number != own):
        for part in text_string_to_metric_families(expositions[number].decode()):
            name = part.name
            whole = families.setdefault(name, Metric(name, part.documentation, part.type))
            if not name.startswith(OF_ENGINES):
                for sample in part.samples:
                    labels = {**sample.labels, "worker": str(number)}
                    whole.add_sample(sample.name, labels, sample.value)
                continue
            values = of_engines.setdefault(name, {})
            for sample in part.samples:
                key = (sample.name, tuple(sample.labels.items()))
                seen = values.setdefault(key, sample.value)
                values[key] = max(seen, sample.value) if part.type == "counter" else seen
    for name, values in of_engines.items():
        for (sample_name, labels_of), value in values.items():
            families[name].add_sample(sample_name, dict(labels_of), value)
    registry = CollectorRegistry()
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed:
    """Metrics as they are."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)

    def describe(self) -> Iterable[Metric]:
        return ()
