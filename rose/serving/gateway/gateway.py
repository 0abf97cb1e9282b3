"""What all requests of a gateway share."""

from concurrent.futures import ThreadPoolExecutor

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
        self.exchanges_in_flight = 0
        self.requests_in_flight = 0
        self.bytes_in_flight = 0
        self.metrics.in_flight.set_function(lambda: self.exchanges_in_flight)

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


class Place:
    """A place among the requests that are served, taken while the block runs."""

    __slots__ = ("_gateway",)

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def __enter__(self) -> None:
        """Takes it.

        Raises:
            ApiError: 429, there is none.
        """
        self._gateway.check_place()
        self._gateway.requests_in_flight += 1

    def __exit__(self, *_: object) -> None:
        self._gateway.requests_in_flight -= 1


class BodyMemory:
    """What one body takes of the memory for bodies: what has arrived, not what is announced.

    It is given back when the block ends.

    Attributes:
        size: Bytes.
    """

    __slots__ = ("_gateway", "size")

    def __init__(self, gateway: Gateway) -> None:
        self.size = 0
        self._gateway = gateway

    def __enter__(self) -> "BodyMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self._gateway.bytes_in_flight -= self.size

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
