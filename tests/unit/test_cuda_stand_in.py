"""What is done with torch.cuda, against a stand-in for it: the order of calls, and errors on the way.

The stand-in checks what the CUDA documentation demands of a capture. It computes nothing, and it is
no proof that the calls do on a GPU what they say.
"""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rose.runtime import cuda_graphs, device
from rose.runtime.cuda_graphs import CudaCapturer
from rose.runtime.device import CudaDevice

CUDA = torch.device("cuda", 0)


class StandInStream:
    def __init__(self, cuda, name):
        self.cuda, self.name, self.capturing = cuda, name, None

    def wait_stream(self, other):
        assert self.capturing is None, "a captured stream must not wait for one outside"
        assert other.capturing is None, "waiting for a stream that is still captured"
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class StandInGraph:
    def __init__(self, cuda):
        self.cuda, self.state, self.stream, self.pool = cuda, "new", None, None

    def capture_begin(self, pool, capture_error_mode):
        assert self.state == "new"
        assert capture_error_mode == "thread_local"
        assert self.cuda.current is not self.cuda.default, "the default stream cannot be captured"
        assert pool not in self.cuda.recording, "the pool is already recorded to"
        self.cuda.recording.add(pool)
        self.state, self.pool, self.stream = "capturing", pool, self.cuda.current
        self.stream.capturing = self

    def capture_end(self):
        assert self.state == "capturing"
        assert self.cuda.current is self.stream
        self.stream.capturing = None
        if self.cuda.invalidated:  # torch leaves the pool as it is then
            self.cuda.invalidated, self.state = False, "broken"
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.recording.discard(self.pool)
        self.state = "captured"

    def replay(self):
        assert self.state == "captured"
        assert self.cuda.current is self.cuda.default
        self.cuda.log.append("replay")

    def reset(self):
        self.state = "reset"


class StandInEvent:
    def __init__(self, blocking):
        self.blocking, self.stream, self.waited = blocking, None, False

    def record(self, stream):
        self.stream = stream

    def synchronize(self):
        assert self.stream is not None
        self.waited = True


class StandInCuda:
    """The part of torch.cuda that is used."""

    def __init__(self):
        self.log, self.recording, self.pools = [], set(), 0
        self.default = self.current = StandInStream(self, "compute")
        self.invalidated = False
        self.free = 10_000
        self.graphs = []

    def Stream(self, wanted):  # noqa: N802 - torch's name
        assert wanted == CUDA
        return StandInStream(self, "capture")

    def CUDAGraph(self):  # noqa: N802 - torch's name
        self.graphs.append(StandInGraph(self))
        return self.graphs[-1]

    def Event(self, blocking):  # noqa: N802 - torch's name
        return StandInEvent(blocking)

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    def default_stream(self, wanted):
        return self.default

    def current_stream(self, wanted):
        return self.current

    def mem_get_info(self, wanted):
        assert self.current.capturing is None
        return self.free, 100_000

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, what):
        """A kernel of the model."""
        assert not (
            self.current is self.default and any(g.state == "capturing" for g in self.graphs)
        )
        self.log.append(f"{what} on {self.current.name}")


@pytest.fixture
def cuda(monkeypatch):
    cuda = StandInCuda()
    names = SimpleNamespace(cuda=cuda, device=torch.device, empty=torch.empty, uint8=torch.uint8)
    monkeypatch.setattr(cuda_graphs, "torch", names)
    monkeypatch.setattr(device, "torch", names)
    return cuda


def test_warming_runs_between_the_work_before_and_after(cuda):
    CudaCapturer(CUDA).warm(lambda: cuda.launch("model"))
    assert cuda.log == [
        "capture waits for compute",
        "model on capture",
        "compute waits for capture",
    ]
    assert cuda.current is cuda.default


def test_a_capture_on_its_own_stream_into_the_shared_pool(cuda):
    capturer = CudaCapturer(CUDA)

    def model():
        cuda.launch("model")
        cuda.free -= 300

    first, second = capturer.capture(model), capturer.capture(model)
    assert first.num_bytes == second.num_bytes == 300
    assert [graph.state for graph in cuda.graphs] == ["captured"] * 2
    assert {graph.pool for graph in cuda.graphs} == {1}
    first.replay()
    assert cuda.log[-1] == "replay"
    first.release()
    assert cuda.graphs[0].state == "reset"


def test_an_error_of_the_model_ends_the_capture_and_is_raised(cuda):
    capturer = CudaCapturer(CUDA)
    with pytest.raises(ZeroDivisionError):
        capturer.capture(lambda: 1 / 0)
    assert cuda.graphs[0].state == "reset"
    assert cuda.current is cuda.default
    assert not cuda.recording
    assert capturer.capture(lambda: cuda.launch("model")).num_bytes == 0
    assert cuda.graphs[1].pool == 1


@pytest.mark.parametrize("raises", [True, False], ids=["at the call", "at the end"])
def test_after_an_invalid_capture_the_next_has_a_fresh_pool(cuda, raises):
    capturer = CudaCapturer(CUDA)

    def forbidden():
        cuda.invalidated = True
        if raises:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted" if raises else "previous error"):
        capturer.capture(forbidden)
    assert cuda.graphs[0].state == "broken"
    assert capturer._broken == [cuda.graphs[0]]  # kept: the allocator still refers to it
    capturer.capture(lambda: cuda.launch("model"))
    assert cuda.graphs[1].pool == 2
    assert cuda.graphs[1].state == "captured"


def test_one_capture_at_a_time_in_a_process(cuda):
    inside, most, lock = [0], [0], threading.Lock()

    def model():
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        threading.Event().wait(0.02)
        with lock:
            inside[0] -= 1

    def capture():
        capturer = CudaCapturer(CUDA)
        capturer._record = lambda _, function: function()
        capturer.capture(model)

    threads = [threading.Thread(target=capture) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_the_device_runs_copies_and_marks_on_its_stream(cuda):
    chosen = CudaDevice("cuda:0")
    assert chosen.run(lambda: cuda.current) is cuda.default
    event = chosen.event()
    assert event._event.stream is cuda.default
    assert event._event.blocking  # the thread that waits sleeps
    event.wait()
    assert event._event.waited
    copies = []
    target = SimpleNamespace(
        copy_=lambda source, non_blocking: copies.append((source, non_blocking))
    )
    chosen.copy(target, "source")
    assert copies == [("source", True)]
