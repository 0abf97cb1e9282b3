"""The threads of a device: one launches its steps in order, one brings their results to the host.

On a CPU there is only the first: a step that has run is done.
"""

import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from rose.runtime.device import Device, Event, PinnedPool, open_device
from rose.runtime.errors import RuntimeClosedError
from rose.runtime.lazy import LazyTensor

T = TypeVar("T")

Launch = Callable[[], Sequence[Tensor]]
Finish = Callable[[Sequence[Tensor]], T]


class DeviceWorker:
    """Runs submitted functions on one thread of its own, without gradients.

    All runtimes of a process that share a device share its worker, so that their steps take turns
    instead of fighting for the same cores.
    """

    def __init__(self, device: Device | str = "cpu") -> None:
        """Start the threads of a device, given itself or by its name (cpu, cuda, cuda:1)."""
        self._device = open_device(device) if isinstance(device, str) else device
        self._arrivals = _Arrivals(self._device) if self._device is not None else None
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        name = device if isinstance(device, str) else device.name
        self._thread = threading.Thread(target=self._run, name=f"rose-{name}", daemon=True)
        self._thread.start()
        # The interpreter must not end while the thread is in native code: that aborts the process.
        atexit.register(self.close)

    @property
    def device(self) -> Device | None:
        """The asynchronous device, None on a CPU."""
        return self._device

    @property
    def pinned(self) -> PinnedPool | None:
        """The buffers that results arrive in, None on a CPU."""
        return self._arrivals.pool if self._arrivals is not None else None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def submit(self, function: Callable[[], T]) -> LazyTensor[T]:
        """Queue `function` and return at once; its own return is the result.

        Raises:
            RuntimeClosedError: the worker was closed.
        """
        return self._queue(lambda future: future.set_result(function()))

    def launch(self, function: Launch, finish: Finish[T]) -> LazyTensor[T]:
        """Queue a step whose result has to come from the device, and return at once.

        Args:
            function: launches the step and returns its outputs, tensors of the device. It waits
                for no work of the device.
            finish: makes the result of the outputs once they are on the host. It keeps none of
                them: the memory is used again.

        Raises:
            RuntimeClosedError: the worker was closed.
        """

        def run(future: Future[T]) -> None:
            outputs = function()
            if self._arrivals is None:
                future.set_result(finish(outputs))
            else:
                self._arrivals.expect(outputs, finish, future)

        return self._queue(run)

    def close(self) -> None:
        """Stop after the running step and those on the device; those that wait fail.

        A step that has not run ends with `RuntimeClosedError`.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._tasks.put(None)
        self._thread.join()
        if self._arrivals is not None:
            self._arrivals.close()
        atexit.unregister(self.close)

    def _queue(self, run: Callable[[Future[T]], None]) -> LazyTensor[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeClosedError("the runtime is closed")
            self._tasks.put(lambda: self._resolve(future, run))
        return LazyTensor(future)

    def _resolve(self, future: Future[T], run: Callable[[Future[T]], None]) -> None:
        if self._closed:
            future.cancel()
            return
        try:
            if self._device is None:
                run(future)
            else:
                self._device.run(lambda: run(future))
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            future.set_exception(error)

    def _run(self) -> None:
        with torch.inference_mode():
            while (task := self._tasks.get()) is not None:
                task()
                del task  # a waiting thread must not keep the last step's tensors alive


@dataclass(slots=True)
class _Flight:
    """A launched step: the buffers that its outputs are copied to, and the event behind that."""

    future: Future[Any]
    finish: Finish[Any]
    buffers: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # views of the buffers
    event: Event | None = None
    error: BaseException | None = None


class _Arrivals:
    """Copies outputs to pinned memory and waits for them, step by step, on a thread of its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.pool = PinnedPool(device.pinned)
        self._flights: SimpleQueue[_Flight | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"rose-{device.name}-arrivals", daemon=True
        )
        self._thread.start()

    def expect(self, outputs: Sequence[Tensor], finish: Finish[T], future: Future[T]) -> None:
        """Queue the copies behind the step. Called by the thread that launched it."""
        flight = _Flight(future, finish)
        try:
            for output in outputs:
                self._copy(output, flight)
        except BaseException as error:  # noqa: BLE001 - the step's own, kept for its result
            flight.error = error
        try:  # after an error too: earlier copies are on their way into their buffers
            flight.event = self._device.event()
        except BaseException as error:  # noqa: BLE001 - as above
            flight.error = flight.error or error
        self._flights.put(flight)

    def close(self) -> None:
        """Wait for the steps on the device, then stop."""
        self._flights.put(None)
        self._thread.join()
        self.pool.close()

    def _copy(self, output: Tensor, flight: _Flight) -> None:
        num_bytes = output.numel() * output.element_size()
        buffer = self.pool.acquire(num_bytes)
        flight.buffers.append(buffer)
        host = buffer[:num_bytes].view(output.dtype).view(output.shape)
        flight.outputs.append(host)
        self._device.copy(host, output)

    def _run(self) -> None:
        with torch.inference_mode():
            while (flight := self._flights.get()) is not None:
                self._land(flight)
                del flight  # a waiting thread must not keep the last step's tensors alive

    def _land(self, flight: _Flight) -> None:
        """Wait for a step, give its buffers back, and resolve its result."""
        arrived = False
        result = None
        try:
            if flight.event is not None:
                flight.event.wait()
                arrived = True
            if flight.error is None:
                result = flight.finish(flight.outputs)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            flight.error = error
        for buffer in flight.buffers:
            self.pool.release(buffer, reuse=arrived)
        if flight.error is None:
            flight.future.set_result(result)
        else:
            flight.future.set_exception(flight.error)
