"""LazyTensor and the worker that resolves it, on a CPU and on a slow device."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rose.runtime.device import PinnedPool, open_device, upload
from rose.runtime.errors import RuntimeClosedError
from rose.runtime.lazy import LazyTensor
from rose.runtime.worker import DeviceWorker
from tests.fake_device import DeviceError, FakeDevice


@pytest.fixture
def worker():
    worker = DeviceWorker()
    yield worker
    worker.close()


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def slow(device):
    worker = DeviceWorker(device)
    yield worker
    with device.running():
        worker.close()
    assert worker.pinned.in_use == 0


def settle(worker):
    """Wait until the worker has launched all that was submitted."""
    worker.submit(lambda: None).result(10)


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


# On any device


def test_steps_run_in_order_on_one_thread(worker):
    names, order = set(), []

    def task(i):
        names.add(threading.current_thread().name)
        order.append(i)
        return i

    lazies = [worker.submit(lambda i=i: task(i)) for i in range(50)]
    assert [lazy.result(5) for lazy in lazies] == list(range(50)) == order
    assert names == {"rose-cpu"}


def test_submit_returns_before_the_step_ends_and_can_be_polled(worker):
    gate = threading.Event()
    lazy = worker.submit(lambda: gate.wait(5))
    assert not lazy.done()
    with pytest.raises(TimeoutError):
        lazy.result(0.01)
    gate.set()
    assert lazy.result(5) is True
    assert lazy.done()


def test_no_gradients_on_the_worker(worker):
    weight = torch.ones(2, requires_grad=True)
    assert not worker.submit(lambda: weight * 2).result(5).requires_grad


def test_an_error_belongs_to_its_step_alone(worker):
    bad = worker.submit(lambda: 1 / 0)
    good = worker.submit(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        bad.result(5)
    assert good.result(5) == 7


def test_await_and_cancelled_wait(worker):
    async def main():
        gate = threading.Event()
        lazy = worker.submit(lambda: gate.wait(5) and 3)
        waiting = asyncio.ensure_future(_wait(lazy))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        assert await lazy == 3
        assert await lazy == 3
        with pytest.raises(ZeroDivisionError):
            await worker.submit(lambda: 1 / 0)

    async def _wait(lazy):
        return await lazy

    asyncio.run(main())


def test_close_fails_what_waits_and_refuses_more():
    worker = DeviceWorker()
    begun, gate = threading.Event(), threading.Event()
    running = worker.submit(lambda: begun.set() or gate.wait(5))
    waiting = worker.submit(lambda: 1)
    assert begun.wait(5)
    threading.Timer(0.05, gate.set).start()
    worker.close()
    assert running.result(0) is True
    with pytest.raises(RuntimeClosedError):
        waiting.result(0)
    with pytest.raises(RuntimeClosedError):
        worker.submit(lambda: 1)
    worker.close()


def test_on_a_cpu_a_launched_step_is_finished_on_the_spot(worker):
    names = []

    def finish(outputs):
        names.append(threading.current_thread().name)
        return outputs[0].tolist()

    assert worker.launch(lambda: [torch.arange(3)], finish).result(5) == [0, 1, 2]
    assert names == ["rose-cpu"]
    assert worker.device is worker.pinned is None
    with pytest.raises(ZeroDivisionError):
        worker.launch(lambda: [torch.arange(3)], lambda _: 1 / 0).result(5)


def test_the_cpu_is_no_asynchronous_device():
    assert open_device("cpu") is None
    assert upload(torch.arange(3), torch.device("cpu")).tolist() == [0, 1, 2]


# On a slow device


def test_a_launch_returns_before_the_device_is_done(slow, device):
    lazies = [
        slow.launch(lambda i=i: [torch.full((2,), i)], lambda outputs: outputs[0].tolist())
        for i in range(3)
    ]
    settle(slow)  # all three are launched, the device has done nothing
    assert device.events == 3
    assert not any(lazy.done() for lazy in lazies)
    for i, lazy in enumerate(lazies):
        with pytest.raises(TimeoutError):
            lazy.result(0.01)
        device.advance()
        assert lazy.result(5) == [i, i]
        assert not any(later.done() for later in lazies[i + 1 :])
    assert device.threads == {"rose-fake"}


def test_outputs_of_any_dtype_and_shape_arrive(slow, device):
    outputs = [
        torch.arange(6, dtype=torch.float64).view(2, 3),
        torch.zeros(3, 0, dtype=torch.int64),
        torch.tensor(5, dtype=torch.int32),
        torch.randn(4, 8).to(torch.bfloat16)[:, ::2],  # strided
        torch.tensor([True, False]),
    ]
    lazy = slow.launch(lambda: outputs, lambda arrived: [tensor.clone() for tensor in arrived])
    with device.running():
        arrived = lazy.result(5)
    for sent, got in zip(outputs, arrived, strict=True):
        assert sent.dtype == got.dtype
        assert torch.equal(sent, got)


def test_a_step_without_outputs_still_waits_for_the_device(slow, device):
    lazy = slow.launch(list, len)
    settle(slow)
    assert not lazy.done()
    device.advance()
    assert lazy.result(5) == 0


def test_await_does_not_block_the_event_loop(slow, device):
    """The loop itself lets the device go on: if waiting blocked it, nobody ever would."""

    async def main():
        lazy = slow.launch(lambda: [torch.ones(1)], lambda outputs: outputs[0].item())
        asyncio.get_running_loop().call_later(0.02, device.advance)
        assert await asyncio.wait_for(_wait(lazy), 5) == 1

    async def _wait(lazy):
        return await lazy

    settle(slow)
    asyncio.run(main())


def test_giving_up_the_wait_stops_nothing(slow, device):
    async def main():
        lazy = slow.launch(lambda: [torch.ones(1)], lambda outputs: outputs[0].item())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_wait(lazy), 0.01)
        assert not lazy.done()
        return lazy

    async def _wait(lazy):
        return await lazy

    lazy = asyncio.run(main())
    device.advance()
    assert lazy.result(5) == 1  # a callback for the closed loop is no error


def test_results_nobody_reads_give_their_buffers_back(slow, device):
    for _ in range(5):
        slow.launch(lambda: [torch.ones(3), torch.zeros(2)], lambda _: 1)
    settle(slow)
    gc.collect()
    assert slow.pinned.in_use == 10
    with device.running():
        slow.launch(list, len).result(5)
    assert slow.pinned.in_use == 0
    assert slow.pinned.idle == 10


def test_buffers_are_used_again(slow, device):
    for i in range(20):
        lazy = slow.launch(lambda i=i: [torch.full((9,), i)], lambda outputs: outputs[0].sum())
        settle(slow)
        device.advance()
        assert lazy.result(5) == 9 * i
    assert slow.pinned.idle == 1


@pytest.mark.parametrize("what", ["pinned", "copy", "event", "work"])
def test_an_error_of_the_device_belongs_to_its_step(slow, device, what):
    before = slow.launch(lambda: [torch.ones(1)], lambda outputs: outputs[0].item())
    settle(slow)
    device.fail = what
    bad = slow.launch(lambda: [torch.ones(1)], lambda outputs: outputs[0].item())
    settle(slow)
    after = slow.launch(lambda: [torch.ones(1)], lambda outputs: outputs[0].item())
    settle(slow)
    with device.running():
        assert before.result(5) == 1
        with pytest.raises(DeviceError):
            bad.result(5)
        assert after.result(5) == 1


def test_close_waits_for_the_device_and_fails_what_was_not_launched(device):
    worker = DeviceWorker(device)
    begun, gate = threading.Event(), threading.Event()
    launched = worker.launch(lambda: [torch.ones(1)], lambda outputs: outputs[0].item())
    worker.submit(lambda: begun.set() or gate.wait(5))
    waiting = worker.launch(lambda: [torch.ones(1)], lambda outputs: outputs[0].item())
    assert begun.wait(5)
    closing = threading.Thread(target=worker.close)
    closing.start()
    while not worker.closed:
        pass
    gate.set()
    with pytest.raises(RuntimeClosedError):
        waiting.result(5)
    assert closing.is_alive()  # a step is still on the device
    device.advance()
    closing.join(5)
    assert launched.result(0) == 1
    assert worker.pinned.in_use == worker.pinned.idle == 0
    with pytest.raises(RuntimeClosedError):
        worker.launch(list, len)


def test_a_buffer_goes_back_once():
    pool = PinnedPool(lambda size: torch.zeros(size, dtype=torch.uint8))
    buffer = pool.acquire(5000)
    assert buffer.numel() == 8192
    pool.release(buffer)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(buffer)
    assert pool.acquire(8192) is buffer
    assert pool.acquire(8192) is not buffer


class PoolMachine(RuleBasedStateMachine):
    """Buffers in any order of use: each is held by one, and comes back once."""

    @initialize()
    def start(self):
        self.pool = PinnedPool(lambda size: torch.zeros(size, dtype=torch.uint8))
        self.held, self.let_go = [], []

    @rule(num_bytes=st.integers(0, 20_000))
    def acquire(self, num_bytes):
        buffer = self.pool.acquire(num_bytes)
        assert buffer.numel() >= max(1, num_bytes)
        others = {b.data_ptr() for b in self.held + self.let_go}
        assert buffer.data_ptr() not in others
        self.held.append(buffer)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reuse=st.booleans())
    def release(self, data, reuse):
        buffer = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        idle = self.pool.idle
        self.pool.release(buffer, reuse=reuse)
        assert self.pool.idle == idle + reuse
        if not reuse:
            self.let_go.append(buffer)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "pool"):
            assert self.pool.in_use == len(self.held)


@dataclass
class Flight:
    """A step on the device; `lazy` is None where nobody reads it, `expected` where it fails."""

    lazy: LazyTensor | None
    expected: list | None
    buffers: int
    has_event: bool


class WorkerMachine(RuleBasedStateMachine):
    """Steps, errors, given up waits and lost readers in any order."""

    @initialize()
    def start(self):
        self.device = FakeDevice()
        self.worker = DeviceWorker(self.device)
        self.flights = deque()
        self.results = []
        self.number = 0

    @rule(
        sizes=st.lists(st.integers(0, 3000), max_size=3),
        fail=st.sampled_from(["", "", "launch", "copy", "event", "work", "finish"]),
        read=st.booleans(),
    )
    def launch(self, sizes, fail, read):
        self.number += 1
        number = self.number
        fail = "" if fail == "copy" and not sizes else fail
        self.device.fail = fail if fail in ("copy", "event", "work") else None

        def run():
            if fail == "launch":
                raise DeviceError(fail)
            return [torch.full((size,), number) for size in sizes]

        def finish(outputs):
            if fail == "finish":
                raise DeviceError(fail)
            return [output.clone() for output in outputs]

        lazy = self.worker.launch(run, finish)
        settle(self.worker)
        if fail == "launch":
            with pytest.raises(DeviceError):
                lazy.result(5)
            return
        self.flights.append(
            Flight(
                lazy if read else None,
                None if fail else [[number] * size for size in sizes],
                buffers=1 if fail == "copy" else len(sizes),
                has_event=fail != "event",
            )
        )
        self.land_those_without_event()

    @precondition(lambda self: self.flights)
    @rule()
    def give_up_waiting(self):
        for flight in self.flights:
            if flight.lazy is not None:
                with pytest.raises(TimeoutError):
                    flight.lazy.result(0)

    @precondition(lambda self: self.flights)
    @rule()
    def advance(self):
        assert self.device.advance()
        self.land(self.flights.popleft())
        self.land_those_without_event()

    def land_those_without_event(self):
        """Nothing marks their end: they fail as soon as the steps before them have landed."""
        while self.flights and not self.flights[0].has_event:
            self.land(self.flights.popleft())

    def land(self, flight):
        if flight.lazy is not None and flight.expected is None:
            with pytest.raises(DeviceError):
                flight.lazy.result(5)
        elif flight.lazy is not None:
            self.results.append((flight.lazy.result(5), flight.expected))

    @invariant()
    def buffers_out_are_those_of_steps_on_the_device(self):
        if hasattr(self, "worker"):
            wait_until(lambda: self.worker.pinned.in_use == sum(f.buffers for f in self.flights))

    @invariant()
    def results_stay_what_they_were(self):
        for result, expected in getattr(self, "results", ()):
            assert [part.tolist() for part in result] == expected

    def teardown(self):
        if hasattr(self, "worker"):
            with self.device.running():
                self.worker.close()
            for flight in self.flights:
                self.land(flight)
            assert self.worker.pinned.in_use == self.worker.pinned.idle == 0


@pytest.mark.parametrize(("machine", "steps"), [(PoolMachine, 30), (WorkerMachine, 12)])
def test_buffers_and_steps_in_any_order(machine, steps):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=steps, deadline=None)
    )


def test_a_worker_that_nobody_closed_ends_before_the_interpreter_does():
    """Native code that is cut off there aborts the process, now and then."""
    script = """
import atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if "rose" in t.name]))
from rose.runtime.worker import DeviceWorker
DeviceWorker().submit(lambda: 1).result()
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
