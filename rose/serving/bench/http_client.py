"""Asks an OpenAI-compatible server, with nothing but the standard library."""

import base64
import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from rose.serving.bench.loads import Load

TIMEOUT_S = 600


class BenchError(ValueError):
    """A server cannot be measured; the message says why."""


@dataclass(slots=True)
class Stream:
    """A continuation as it came: its text, and when each piece of it did, in seconds."""

    text: str
    began: float
    times: list[float]
    tokens: int


class HttpClient:
    """One connection, kept open; for one thread."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Note where the server is; it is asked at the first request.

        Raises:
            BenchError: it is no http or https address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise BenchError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000")
        self._url, self._path = url, parts.path.rstrip("/").removesuffix("/v1")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
        self._headers = {"Content-Type": "application/json"}
        if api_key and (keys := api_key.split()):  # the server may know several; one is enough
            self._headers["Authorization"] = f"Bearer {keys[0]}"

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def models(self) -> list[str]:
        """Return the names of what is served."""
        answer = json.loads(self._ask("GET", "/v1/models", None).read())
        return [str(model["id"]) for model in answer["data"]]

    def embed(self, body: bytes) -> bytes:
        """Send a request of `embed_body` and return the answer as it is."""
        return self._ask("POST", "/v1/embeddings", body).read()

    def stream(self, body: bytes) -> Stream:
        """Send a request of `stream_body` and read the answer to its end."""
        began = time.perf_counter()
        answer = self._ask("POST", "/v1/completions", body)
        out = Stream("", began, [], 0)
        for event in _events(answer):
            if "error" in event:
                raise BenchError(f"{self._url}: {event['error']}")
            if usage := event.get("usage"):
                out.tokens = int(usage["completion_tokens"])
            for choice in event.get("choices", ()):
                if choice.get("text"):
                    out.text += choice["text"]
                    out.times.append(time.perf_counter())
        if not out.times:
            raise BenchError(f"{self._url}: a stream brought no text")
        return out

    def _ask(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        try:
            self._connection.request(method, self._path + path, body, self._headers)
            answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"{self._url}{path}: {error}") from error
        if answer.status != 200:
            raise BenchError(f"{self._url}{path}: {answer.status} {answer.read()[:300]!r}")
        return answer


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def embed_body(model: str, inputs: Sequence[list[int]] | Sequence[str]) -> bytes:
    """Write a request for vectors, as bytes and not as digits."""
    body = {"model": model, "input": list(inputs), "encoding_format": "base64"}
    return json.dumps(body).encode()


def vectors_of(answer: bytes) -> npt.NDArray[np.float32]:
    """Read the vectors of an answer: float32 [texts, dimensions]."""
    items = sorted(json.loads(answer)["data"], key=lambda item: int(item["index"]))
    rows = [item["embedding"] for item in items]
    if rows and isinstance(rows[0], str):
        return np.stack([np.frombuffer(base64.b64decode(row), "<f4") for row in rows])
    return np.array(rows, np.float32)


def stream_body(model: str, prompt: list[int] | str, load: Load) -> bytes:
    """Write a request for a greedy continuation of exactly so many tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    return json.dumps(body).encode()
