"""A timeline of steps: the host prepares and launches the next one while the device is at work."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rose.kernels.attention.choice import choose
from rose.models.loader import load
from rose.runtime.device import CudaDevice, Device
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.worker import DeviceWorker
from tools.gpu.stage import Context

T = TypeVar("T")
STEPS = 8
WIDTH = 60  # characters of the timeline


@dataclass
class Step:
    """Seconds since the start: the launch on the host, and the arrival of the result."""

    began: float = 0.0
    launched: float = 0.0
    arrived: float = 0.0


class SlowDevice:
    """Stands for a GPU in a dry run: each step is done a while after the one before it."""

    name = "slow"
    step_s = 0.1

    def __init__(self) -> None:
        self._free_at = 0.0

    def run(self, function: Callable[[], T]) -> T:
        return function()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def event(self) -> "SlowEvent":
        self._free_at = max(self._free_at, time.perf_counter()) + self.step_s
        return SlowEvent(self._free_at)


class SlowEvent:
    """Comes when its time has come."""

    def __init__(self, at: float) -> None:
        self._at = at

    def wait(self) -> None:
        time.sleep(max(0.0, self._at - time.perf_counter()))


def run(context: Context) -> None:
    """Run batches with two in flight and draw when what happened."""
    device: Device = SlowDevice() if context.dry else CudaDevice("cuda")
    loaded = load(
        context.folder / "qwen3", device=str(context.device), dtype=context.dtype, tasks=("embed",)
    )
    assert loaded.embedding is not None
    specs = loaded.backbone.attention_specs
    backend = choose("auto", specs, loaded.dtype, context.device)
    worker = DeviceWorker(device)
    try:
        runtime = EmbeddingRuntime(loaded.embedding, backend, worker, device=context.device)
        for _ in range(2):  # the first time compiles
            steps = _timeline(runtime, worker, *((1, 16) if context.dry else (32, 512)))
    finally:
        worker.close()
    _report(context, steps)


def _timeline(
    runtime: EmbeddingRuntime, worker: DeviceWorker, texts: int, length: int
) -> list[Step]:
    ids = np.random.default_rng(0).integers(2, 290, texts * length, dtype=np.int32)
    batch = EmbedBatch(ids, np.full(texts, length, np.int32), np.zeros(texts, np.int32))
    steps = [Step() for _ in range(STEPS)]
    began = time.perf_counter()
    launch = worker.launch

    def observed(function: Callable[[], object], finish: Callable[..., object]) -> object:
        step = steps[observed.count]
        observed.count += 1

        def launched() -> object:
            step.began = time.perf_counter() - began
            outputs = function()
            step.launched = time.perf_counter() - began
            return outputs

        return launch(launched, finish)

    observed.count = 0
    worker.launch = observed
    try:
        flights = [runtime.step(batch), runtime.step(batch)]
        for number, step in enumerate(steps):
            flights[number].result(300)
            step.arrived = time.perf_counter() - began
            if len(flights) < STEPS:
                flights.append(runtime.step(batch))
    finally:
        worker.launch = launch
    return steps


def _report(context: Context, steps: list[Step]) -> None:
    overlapped = sum(b.launched < a.arrived for a, b in pairwise(steps))
    name = "steps that were launched before the one ahead was done"
    context.report.check(
        name, f"{overlapped} of {STEPS - 1}", "at least half", 2 * overlapped >= STEPS - 1
    )
    rows = [
        [i, *(f"{1e3 * t:.2f}" for t in (s.began, s.launched, s.arrived))]
        for i, s in enumerate(steps)
    ]
    columns = ["step", "launch begins, ms", "launch ends, ms", "result arrives, ms"]
    context.report.table("Two steps in flight", columns, rows)
    context.report.notes.append("```\n" + "\n".join(_draw(steps)) + "\n```")


def _draw(steps: list[Step]) -> list[str]:
    """A line per step: L while the host launches, = until its result is there."""
    scale = (WIDTH - 1) / steps[-1].arrived
    lines = ["L the host launches, = the device works or the step waits"]
    for number, step in enumerate(steps):
        first, middle, last = (int(scale * t) for t in (step.began, step.launched, step.arrived))
        bar = " " * first + "L" * max(1, middle - first) + "=" * max(1, last - middle)
        lines.append(f"step {number} |{bar[:WIDTH]:<{WIDTH}}|")
    return lines
