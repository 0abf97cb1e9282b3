"""Work of an event loop that is done when somebody asked for it."""

import asyncio
import contextlib
from collections.abc import Callable


class Turns:
    """Calls a function in the event loop: once for all that asked for it before.

    A task that waits for an `asyncio.Event` does the same by way of a future, a callback and one
    more turn of the loop, which a request has to wait for.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        """Call `take`."""
        self._take = take
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Future[None] | None = None
        self._asked = False

    async def run(self) -> None:
        """Take a first turn, and others when asked, until cancelled or until one raises."""
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        self.ask()
        try:
            await self._end
        finally:
            self._loop = None

    def ask(self) -> None:
        """Ask for a turn behind what the loop has to do already."""
        if self._loop is not None and not self._asked:
            self._asked = True
            self._loop.call_soon(self._as_asked)

    def ask_from_thread(self) -> None:
        """Ask for a turn, from any thread."""
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self.now)

    def _as_asked(self) -> None:
        self._asked = False
        self.now()

    def now(self) -> None:
        """Take a turn; an error ends them all. One that was asked for comes all the same."""
        if self._loop is None or self._end is None or self._end.done():
            return
        try:
            self._take()
        except Exception as error:  # noqa: BLE001 - raised by `run`
            self._end.set_exception(error)
