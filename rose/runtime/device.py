"""What a worker needs of an asynchronous device, and the pinned memory that results arrive in.

A `Device` queues work and returns before it is done. `CudaDevice` is the real one; tests inject a
slow one of their own. The CPU is none: there a call that returns has done its work.
"""

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

MIN_BUFFER_BYTES = 1 << 12


class Event(Protocol):
    """A mark in the device's queue of work."""

    def wait(self) -> None:
        """Block this thread, without the GIL, until the device has come past the mark.

        Raises:
            RuntimeError: work before the mark failed on the device.
        """
        ...


class Device(Protocol):
    """One queue of work, filled by one thread."""

    name: str

    def run(self, function: Callable[[], T]) -> T:
        """Call `function`; the device work that it launches goes into the queue."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate host memory that the device can copy to by itself: uint8 [num_bytes]."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between a tensor of the device and one in pinned memory."""
        ...

    def event(self) -> Event:
        """Mark the place in the queue behind all work so far."""
        ...


class CudaDevice:
    """A CUDA device and its default stream.

    Weights and page pools are made on that stream too, by whichever thread loads them; so no step
    can overtake them.
    """

    def __init__(self, name: str) -> None:
        """Use the device `name`, such as cuda or cuda:1."""
        self.name = name
        self._stream = torch.cuda.default_stream(torch.device(name))

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` with the device and its stream current."""
        with torch.cuda.stream(self._stream):
            return function()

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate page-locked memory, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; one side is in pinned memory, so the host does not wait."""
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        """Record an event on the stream."""
        return _CudaEvent(self._stream)


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps, it does not spin
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


def open_device(name: str) -> Device | None:
    """Return the asynchronous device `name`; None for a CPU."""
    return CudaDevice(name) if torch.device(name).type == "cuda" else None


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a host tensor to a device without waiting for the work before it.

    From pageable memory the driver may wait for the stream. torch keeps the pinned copy until the
    device has read it.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class PinnedPool:
    """Host buffers that results arrive in, used again and again: pinning memory takes long.

    Each goes out by `acquire` and has to come back by `release` exactly once.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        """Take memory from `allocate`, which returns uint8 [bytes]."""
        self._allocate = allocate
        self._lock = threading.Lock()
        self._idle: dict[int, list[Tensor]] = {}
        self._out: dict[int, Tensor] = {}

    @property
    def in_use(self) -> int:
        """Buffers that are out."""
        return len(self._out)

    @property
    def idle(self) -> int:
        """Buffers that wait to be used again."""
        return sum(map(len, self._idle.values()))

    def acquire(self, num_bytes: int) -> Tensor:
        """Take a buffer, uint8 of at least `num_bytes`: the next power of two."""
        size = max(MIN_BUFFER_BYTES, 1 << max(0, num_bytes - 1).bit_length())
        with self._lock:
            idle = self._idle.get(size)
            buffer = idle.pop() if idle else self._allocate(size)
            self._out[id(buffer)] = buffer
        return buffer

    def release(self, buffer: Tensor, *, reuse: bool = True) -> None:
        """Give a buffer back; without `reuse` it is let go, since the device may still write to it.

        torch frees pinned memory only when the device has done all copies that it knows of.
        """
        with self._lock:
            assert self._out.pop(id(buffer), None) is buffer, "a buffer was given back twice"
            if reuse:
                self._idle.setdefault(buffer.numel(), []).append(buffer)

    def close(self) -> None:
        """Let go of the idle buffers."""
        with self._lock:
            self._idle.clear()
