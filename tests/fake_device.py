"""A slow device for tests: its work waits in a queue until the test lets it go on."""

import threading
import time
from collections import deque
from contextlib import contextmanager

import torch


class DeviceError(RuntimeError):
    """What the fake device fails with."""


class FakeEvent:
    def __init__(self):
        self.reached = threading.Event()
        self.error = None

    def wait(self):
        assert self.reached.wait(20), "nobody let the device go on"
        if self.error is not None:
            raise self.error


class FakeDevice:
    """Queues copies and events; `advance` runs them up to the next event.

    A queued copy spoils its target first, so that whoever reads it too early, or keeps it too long,
    sees garbage. `fail` names what goes wrong next: "pinned", "copy", "event" or "work".
    """

    name = "fake"

    def __init__(self):
        self.queue = deque()
        self.targets = set()  # memory that a queued copy will write to
        self.fail = None
        self.events = 0  # queued and not reached
        self.max_events = 0
        self.threads = set()
        self._lock = threading.Lock()

    def run(self, function):
        self.threads.add(threading.current_thread().name)
        return function()

    def pinned(self, num_bytes):
        self._maybe_fail("pinned")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target, source):
        self._maybe_fail("copy")
        place = target.data_ptr()
        assert place not in self.targets, "a buffer is used again before its copy is done"
        self.targets.add(place)
        target.view(-1).view(torch.uint8).fill_(0xFF)
        source = source.clone()

        @torch.inference_mode()
        def write():
            target.copy_(source)
            self.targets.discard(place)

        self.queue.append(write)

    def event(self):
        event = FakeEvent()
        if self.fail == "work":
            self.fail, event.error = None, DeviceError("the device failed")
        self._maybe_fail("event")
        with self._lock:
            self.events += 1
            self.max_events = max(self.max_events, self.events)
            self.queue.append(event)
        return event

    def advance(self):
        """Run the queue up to and with the next event; say whether there was one."""
        while self.queue:
            work = self.queue.popleft()
            if isinstance(work, FakeEvent):
                with self._lock:
                    self.events -= 1
                work.reached.set()
                return True
            work()
        return False

    @contextmanager
    def running(self, seconds_per_step=0.0):
        """Let the device run by itself for a while."""
        stop = threading.Event()

        def go_on():
            while not stop.is_set() or self.events:
                if self.events:
                    time.sleep(seconds_per_step)
                    self.advance()
                else:
                    time.sleep(0.0005)

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join(10)

    def _maybe_fail(self, what):
        if self.fail == what:
            self.fail = None
            raise DeviceError(what)
