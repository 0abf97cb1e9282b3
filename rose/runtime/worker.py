"""The thread that launches a device's work: steps run on it one after another, in order."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import torch

from rose.runtime.errors import RuntimeClosedError
from rose.runtime.lazy import LazyTensor

T = TypeVar("T")


class DeviceWorker:
    """Runs submitted functions on one thread of its own, without gradients.

    All runtimes of a process that share a device share its worker, so that their steps take turns
    instead of fighting for the same cores.
    """

    def __init__(self, name: str = "cpu") -> None:
        """Start the thread."""
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"rose-{name}", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> LazyTensor[T]:
        """Queue `function` and return at once.

        Raises:
            RuntimeClosedError: the worker was closed.
        """
        if self._closed:
            raise RuntimeClosedError("the runtime is closed")
        future: Future[T] = Future()
        self._tasks.put(lambda: _resolve(future, function, self))
        return LazyTensor(future)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Stop after the running step; steps that wait fail with `RuntimeClosedError`."""
        self._closed = True
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (task := self._tasks.get()) is not None:
                task()
                del task  # a waiting thread must not keep the last step's tensors alive


def _resolve(future: Future[T], function: Callable[[], T], worker: DeviceWorker) -> None:
    if worker.closed:
        future.cancel()
        return
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - it is raised again where the result is awaited
        future.set_exception(error)
    else:
        future.set_result(result)
