"""The host prepares and launches step n + 1 while step n is on the device: both runtimes, one code.

The device is a slow one whose work only goes on when the test says so. It lets step n go on once
step n + 1 is launched, so without overlap nothing would ever come.
"""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rose.kernels.attention.torch_sdpa import TorchSdpaBackend
from rose.models.card import EmbeddingCard, ModelCard, TokenizerCard
from rose.runtime.embedding import EmbeddingRuntime
from rose.runtime.options import EmbedOptions
from rose.runtime.queue import EmbedJob
from rose.runtime.worker import DeviceWorker
from rose.serving.embed_service import MAX_STEPS_IN_FLIGHT, EmbedService
from tests.fake_device import DeviceError, FakeDevice
from tests.generation_rig import Rig
from tests.unit.test_generation import ToyModel, mixed_requests

BUDGET = 32
CARD = ModelCard(
    name="toy",
    path="toy",
    architecture="bert",
    dtype="float32",
    tasks=("embed",),
    vocab_size=1000,
    max_model_len=64,
    fingerprint="f",
    created=0,
    tokenizer=TokenizerCard(),
    embedding=EmbeddingCard(dimensions=2, hidden_size=2, normalize=False, pooling="mean"),
)


class Sums:
    """A text's vector is (sum of its ids, its length). Records when the host launched a batch."""

    dimensions = 2

    def __init__(self, log):
        self.log = log

    def __call__(self, tokens, cu_seqlens, pool_from):
        self.log.append("launch")
        sums = torch.segment_reduce(
            tokens.input_ids.float(), "sum", lengths=cu_seqlens.diff().long(), unsafe=True
        )
        return torch.stack([sums, cu_seqlens.diff().float()], dim=1)


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def worker(device):
    worker = DeviceWorker(device)
    yield worker
    with device.running():
        worker.close()
    assert worker.pinned.in_use == 0


class Pacer:
    """Lets the device end a step only when the one behind it is launched, or there is none."""

    def __init__(self, device, log):
        self.device, self.log, self.left, self.steps = device, log, 0, 0

    def tick(self):
        full = self.device.events == MAX_STEPS_IN_FLIGHT
        if full or (self.left == 1 and self.device.events == 1):
            self.log.append("done")
            self.left -= 1
            self.steps += 1
            self.device.advance()


def interleaved(steps):
    """Two launches, then one more after each step that is done."""
    return ["launch", "launch"] + ["done", "launch"] * (steps - 2) + ["done", "done"]


def drive_service(runtime, device, log, jobs, steps):
    """Serve jobs; returns their outcomes in order."""
    served = SimpleNamespace(card=CARD, embedding=runtime, max_batch_tokens=BUDGET)
    outcomes = {}

    async def main():
        service = EmbedService(served, max_queue_tokens=1 << 20)
        pacer = Pacer(device, log)
        pacer.left = steps

        def deliver(index, outcome):
            outcomes[index] = outcome

        for index, job in enumerate(jobs):
            service.submit(job, EmbedOptions(), lambda outcome, i=index: deliver(i, outcome))
        task = asyncio.create_task(service.run())
        async with asyncio.timeout(20):
            while len(outcomes) < len(jobs):
                assert not task.done()
                pacer.tick()
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    return [outcomes[i] for i in range(len(jobs))]


def full_batches(count):
    """Jobs of which each fills a batch."""
    rng = np.random.default_rng(0)
    lengths = np.full(4, BUDGET // 4, np.int32)
    return [EmbedJob(rng.integers(1, 9, BUDGET, dtype=np.int32), lengths) for _ in range(count)]


def test_the_embedding_service_keeps_two_batches_in_flight(worker, device):
    log, jobs = [], full_batches(6)
    runtime = EmbeddingRuntime(Sums(log), TorchSdpaBackend(), worker)
    outcomes = drive_service(runtime, device, log, jobs, steps=6)
    assert log == interleaved(6)
    assert device.max_events == MAX_STEPS_IN_FLIGHT
    for job, outcome in zip(jobs, outcomes, strict=True):
        sums = job.ids.reshape(4, -1).sum(1)
        assert outcome.vectors.tolist() == [[float(s), BUDGET / 4] for s in sums]


def test_forming_and_launching_a_batch_waits_for_nothing_on_the_device(worker, device):
    """With the device at a stand, two batches are launched and a third is formed no more."""
    log, jobs = [], full_batches(3)
    runtime = EmbeddingRuntime(Sums(log), TorchSdpaBackend(), worker)
    served = SimpleNamespace(card=CARD, embedding=runtime, max_batch_tokens=BUDGET)

    async def main():
        service = EmbedService(served, max_queue_tokens=1 << 20)
        for job in jobs:
            service.submit(job, EmbedOptions(), lambda _: None)
        task = asyncio.create_task(service.run())
        async with asyncio.timeout(10):
            while device.events < 2:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # the event loop is free, and nothing more is launched
        assert log == ["launch", "launch"]
        assert service.queue.tokens == BUDGET
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_an_error_on_the_device_fails_its_batch_alone(worker, device):
    log, jobs = [], full_batches(3)
    runtime = EmbeddingRuntime(Sums(log), TorchSdpaBackend(), worker)
    device.fail = "work"  # of the first event that is queued
    outcomes = drive_service(runtime, device, log, jobs, steps=3)
    assert isinstance(outcomes[0], RuntimeError)
    assert "the device failed" in str(outcomes[0])
    assert [outcome.vectors.shape for outcome in outcomes[1:]] == [(4, 2)] * 2


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    yield ToyModel().eval()
    torch.set_num_threads(threads)


def test_the_generation_loop_keeps_two_steps_in_flight(model, worker, device):
    """The second token's step is launched before the host has seen the first token."""
    rig = Rig(model, worker)
    rig.add("a", [1, 2, 3], temperature=0, max_tokens=5)
    rig.advance()
    worker.submit(lambda: None).result(10)
    assert device.events == 2
    assert device.advance()
    rig.collect()
    assert len(rig.outputs["a"].tokens) == 1
    with device.running():
        rig.drain()
    assert device.max_events == 2
    assert len(rig.outputs["a"].tokens) == 5


def test_generation_over_a_slow_device_gives_the_same(model, worker, device):
    cpu = DeviceWorker()
    requests = mixed_requests(12)
    expected = Rig(model, cpu).run(requests)
    cpu.close()
    with device.running(seconds_per_step=0.001):
        outputs = Rig(model, worker).run(requests)
    for output, other in zip(outputs, expected, strict=True):
        assert output == other


def test_generation_steps_interleave_like_batches(model, worker, device):
    log = []
    rig = Rig(model, worker)
    launch = rig.runtime._launch
    rig.runtime._launch = lambda step: log.append("launch") or launch(step)
    rig.add("a", [1, 2, 3], temperature=0, max_tokens=6)
    pacer = Pacer(device, log)
    pacer.left = 6
    stop = threading.Event()

    def pace():
        while not stop.wait(0.001):
            pacer.tick()

    thread = threading.Thread(target=pace)
    thread.start()
    rig.drain()
    stop.set()
    thread.join()
    assert log == interleaved(6)


def test_an_error_on_the_device_ends_the_sequences_of_its_step(model, worker, device):
    rig = Rig(model, worker)
    device.fail = "work"
    rig.add("a", [1, 2, 3], temperature=0, max_tokens=5)
    with device.running():
        rig.drain()
        assert isinstance(rig.outputs["a"].error, DeviceError)
        rig.add("b", [4, 5], temperature=0, max_tokens=3)
        rig.drain()
    assert len(rig.outputs["b"].tokens) == 3
