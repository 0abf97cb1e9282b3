"""What can be measured: a model in this process, or one behind HTTP.

A target gets all requests of a load before the clock starts, so that making them costs nothing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rose.runtime.options import SamplingParams
from rose.serving.bench.http_client import (
    BenchError,
    HttpClient,
    Stream,
    embed_body,
    stream_body,
    vectors_of,
)
from rose.serving.bench.loads import Load

if TYPE_CHECKING:
    from rose.serving.local import Engine

Vectors = npt.NDArray[np.float32]
Inputs = Sequence[list[int]] | Sequence[str]
Result = TypeVar("Result")


class Target(Protocol):
    """Something that is measured, under a name."""

    name: str

    def vectors(self, inputs: Inputs) -> Vectors:
        """Embed a request's inputs: float32 [texts, dimensions]."""
        ...

    def embed(self, requests: Sequence[Inputs], clients: int) -> list[float]:
        """Send requests, `clients` at a time, and return the seconds of each."""
        ...

    def decode(self, prompts: Sequence[list[int]], load: Load) -> list[Stream]:
        """Continue prompts, all at a time."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


@dataclass
class InProcess:
    """A model in this process. It takes one request at a time, so clients are one after another."""

    engine: "Engine"
    name: str = "in process"

    def vectors(self, inputs: Inputs) -> Vectors:
        """Embed a request's inputs."""
        found: Vectors = self.engine.embed(inputs)
        return found

    def embed(self, requests: Sequence[Inputs], clients: int) -> list[float]:
        """Embed requests one after another; what clients wait for each other counts."""
        times: list[float] = []
        for first in range(0, len(requests), clients):
            began = time.perf_counter()
            for request in requests[first : first + clients]:
                self.engine.embed(request)
                times.append(time.perf_counter() - began)
        return times

    def decode(self, prompts: Sequence[list[int]], load: Load) -> list[Stream]:
        """Continue prompts side by side: a step serves them all."""
        params = SamplingParams(temperature=0.0, max_tokens=load.new_tokens, ignore_eos=True)
        began = time.perf_counter()
        pieces = [self.engine.stream(prompt, params) for prompt in prompts]
        streams = [Stream("", began, [], load.new_tokens) for _ in prompts]
        running = list(zip(streams, pieces, strict=True))
        while running:
            running = [pair for pair in running if _advance(*pair)]
        return streams

    def close(self) -> None:
        """Free the model."""
        self.engine.close()


def _advance(stream: Stream, pieces: Iterator[str]) -> bool:
    """Take the next piece of a stream; says whether there was one."""
    piece = next(pieces, None)
    if piece is None:
        return False
    stream.text += piece
    stream.times.append(time.perf_counter())
    return True


@dataclass
class Server:
    """A model of an OpenAI-compatible server."""

    url: str
    model: str
    api_key: str | None = None
    name: str = ""
    _clients: list[HttpClient] = field(default_factory=list)

    @classmethod
    def find(cls, url: str, model: str | None, api_key: str | None) -> "Server":
        """Look for a model of a server; None is its first.

        Raises:
            BenchError: it does not answer, or has no such model.
        """
        client = HttpClient(url, api_key)
        served = client.models()
        client.close()
        if not served or model not in (None, *served):
            raise BenchError(f"{url} serves {', '.join(served) or 'nothing'}, and not {model!r}")
        return cls(url, model or served[0], api_key, url)

    def vectors(self, inputs: Inputs) -> Vectors:
        """Embed a request's inputs."""
        return vectors_of(self._client(0).embed(embed_body(self.model, inputs)))

    def embed(self, requests: Sequence[Inputs], clients: int) -> list[float]:
        """Send requests, each client one after another."""
        bodies = [embed_body(self.model, request) for request in requests]
        return self._share(bodies, clients, _timed_embed)

    def decode(self, prompts: Sequence[list[int]], load: Load) -> list[Stream]:
        """Continue prompts, each on a connection of its own."""
        bodies = [stream_body(self.model, prompt, load) for prompt in prompts]
        return self._share(bodies, len(bodies), HttpClient.stream)

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()

    def _client(self, index: int) -> HttpClient:
        while len(self._clients) <= index:
            self._clients.append(HttpClient(self.url, self.api_key))
        return self._clients[index]

    def _share(
        self, bodies: Sequence[bytes], clients: int, send: Callable[[HttpClient, bytes], Result]
    ) -> list[Result]:
        """Let each of so many clients send every so many-th request."""
        self._client(clients - 1)

        def work(index: int) -> list[Result]:
            return [send(self._clients[index], body) for body in bodies[index::clients]]

        if clients == 1:
            return work(0)
        with ThreadPoolExecutor(clients) as pool:
            shares = list(pool.map(work, range(clients)))
        return [shares[i % clients][i // clients] for i in range(len(bodies))]


def _timed_embed(client: HttpClient, body: bytes) -> float:
    began = time.perf_counter()
    client.embed(body)
    return time.perf_counter() - began
