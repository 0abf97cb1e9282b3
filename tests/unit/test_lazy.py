"""LazyTensor and the worker that resolves it."""

import asyncio
import threading

import pytest
import torch

from rose.runtime.errors import RuntimeClosedError
from rose.runtime.worker import DeviceWorker


@pytest.fixture
def worker():
    worker = DeviceWorker()
    yield worker
    worker.close()


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
    gate = threading.Event()
    running = worker.submit(lambda: gate.wait(5))
    waiting = worker.submit(lambda: 1)
    threading.Timer(0.05, gate.set).start()
    worker.close()
    assert running.result(0) is True
    with pytest.raises(RuntimeClosedError):
        waiting.result(0)
    with pytest.raises(RuntimeClosedError):
        worker.submit(lambda: 1)
