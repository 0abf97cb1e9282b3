"""`LazyTensor`: a result that is still on its way from the device to the host."""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rose.runtime.errors import RuntimeClosedError

T = TypeVar("T")


class LazyTensor(Generic[T]):
    """Stands for what a `step` will have computed. It can be polled, waited for, and awaited.

    An error of the step is raised at the wait. Giving up the wait (a timeout, a cancelled task)
    does not stop the step, and others may still wait for it.
    """

    __slots__ = ("_future",)

    def __init__(self, future: "Future[T]") -> None:
        """Wrap the future that the device's worker resolves."""
        self._future = future

    def done(self) -> bool:
        """Say whether the result (or an error) has arrived."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            TimeoutError: the result has not arrived in time; it still will.
            RuntimeClosedError: the runtime was closed before the step ran.
        """
        try:
            return self._future.result(timeout)
        except CancelledError:
            raise RuntimeClosedError("the runtime was closed before this step ran") from None

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the result has arrived, from whichever thread brings it."""
        self._future.add_done_callback(lambda _: callback())

    def __await__(self) -> Generator[Any, None, T]:
        if not self._future.done():
            yield from self._arrival().__await__()
        return self.result()

    async def _arrival(self) -> None:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(arrived.set)

        self.add_done_callback(wake)
        await arrived.wait()
