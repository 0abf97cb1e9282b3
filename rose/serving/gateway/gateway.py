"""What all requests of a gateway share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rose.serving.gateway.auth import Keys
from rose.serving.gateway.errors import ApiError
from rose.serving.gateway.metrics import Metrics
from rose.serving.gateway.models import ModelTable
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.workers import Workers


class Gateway:
    """Models, settings, metrics and threads, and what is in flight."""

    def __init__(
        self, table: ModelTable, settings: GatewaySettings, workers: Workers | None = None
    ) -> None:
        self.table = table
        self.workers = workers
        self.settings = settings
        self.keys = Keys(settings.api_keys)
        self.metrics = Metrics(table)
        threads = settings.tokenizer_threads
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="rose-text")
        self.heavy_pool = ThreadPoolExecutor(-(-threads // 2), thread_name_prefix="rose-heavy")
        self.requests_in_flight = 0
        self.bytes_in_flight = 0

    def close(self) -> None:
        """Ends the threads, when their work is done."""
        for pool in (self.pool, self.heavy_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def check_place(self) -> None:
        """See that there is a place, without taking it.

        Raises:
            ApiError: 429, there is none.
        """
        if self.requests_in_flight >= self.settings.max_concurrent_requests:
            raise _overloaded("Too many requests are being served.")

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among the requests that are served.

        Raises:
            ApiError: 429, there is none.
        """
        self.check_place()
        self.requests_in_flight += 1
        try:
            yield
        finally:
            self.requests_in_flight -= 1

    @contextmanager
    def memory(self) -> Iterator["BodyMemory"]:
        """Room for one body, which takes it up as its bytes arrive."""
        body = BodyMemory(self)
        try:
            yield body
        finally:
            self.bytes_in_flight -= body.size


class BodyMemory:
    """What one body takes of the memory for bodies: what has arrived, not what is announced.

    Attributes:
        size: Bytes.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.size = 0
        self._gateway = gateway

    def grow(self, size: int) -> None:
        """Takes room for `size` more bytes; a body that is alone may have any size.

        Raises:
            ApiError: 429, there is none.
        """
        total = self._gateway.bytes_in_flight + size
        alone = total == self.size + size
        if not alone and total > self._gateway.settings.max_body_bytes_in_flight:
            raise _overloaded("Too much input is being served.")
        self._gateway.bytes_in_flight = total
        self.size += size


def _overloaded(message: str) -> ApiError:
    return ApiError(429, f"{message} Try again later.", code="overloaded")
