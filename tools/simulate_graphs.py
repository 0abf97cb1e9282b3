#!/usr/bin/env python3
"""Replay a load on a simulated GPU: hits, padding and captures of the graph cache.

The cache, its buckets and its limits are the real ones, and so are the queue and its batches. Only
the clock and the device are made up: a model of so many launches, bytes and operations. So hit
rate, padding and captures are what they would be; the latencies are only as good as the model.
"""

import argparse
import heapq
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rose.runtime.graphs import (
    BatchTime,
    GraphCache,
    GraphKey,
    GraphPolicy,
    measure_inflection,
    ragged_key,
)
from rose.runtime.queue import EmbedJob, EmbedQueue, JobSlice
from rose.serving.graph_grids import graph_grids
from rose.serving.graph_picture import draw_grid
from tools.report import PAGES, Report, add_output_options

PICTURE = "graphs.svg"
STEPS_IN_FLIGHT = 2
MAX_TEXTS = 1024
SETTLED = 1000  # requests after which the cache is looked at on its own


@dataclass(frozen=True)
class Gpu:
    """Seconds that things take, for a model of about 0.6 billion parameters on an H200.

    `launches_s` of an eager forward pass, of a replay `replay_s`, of a capture `capture_s`. The
    device reads the weights in `weights_s`, and needs at least `token_s` for each token.
    """

    launches_s: float = 3.5e-3
    replay_s: float = 0.1e-3
    capture_s: float = 15e-3
    weights_s: float = 0.3e-3
    token_s: float = 2e-6

    def work_s(self, tokens: int) -> float:
        """Return how long the device works on a batch."""
        return max(self.weights_s, self.token_s * tokens)

    def time_batch(self, tokens: int) -> BatchTime:
        """Return how long an eager batch takes on its own."""
        return BatchTime(self.launches_s, max(self.launches_s, self.work_s(tokens)))


@dataclass(frozen=True)
class Load:
    """Requests of one text each: when they come, in seconds, and their tokens."""

    arrivals: np.ndarray
    lengths: np.ndarray

    @classmethod
    def draw(cls, options: argparse.Namespace, per_second: float) -> "Load":
        """Draw random arrivals and lognormal lengths."""
        rng = np.random.default_rng(options.seed)
        lengths = rng.lognormal(np.log(options.median), options.sigma, options.requests)
        gaps = rng.exponential(1 / per_second, options.requests)
        return cls(np.cumsum(gaps), np.clip(lengths, 1, options.longest).astype(np.int32))


@dataclass
class Batch:
    """Tokens per text."""

    lengths: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return int(self.lengths.sum())


class SimulatedGraph:
    """A graph of a few megabytes."""

    num_bytes = 8 << 20

    def __init__(self, replay: Callable[[], None]) -> None:
        """Keep what a replay does."""
        self.replay = replay

    def release(self) -> None:
        """Free nothing."""


class SimulatedDevice:
    """Host thread and device with a clock each. It is the forward pass, its program, and capturer.

    `done` is when the device ends what was launched so far.
    """

    def __init__(self, gpu: Gpu, min_pad: int) -> None:
        """Start at time 0."""
        self.gpu = gpu
        self.host = self.done = 0.0
        self._min_pad = min_pad
        self._key: GraphKey | None = None

    def key(self, batch: Batch) -> GraphKey:
        """Return a batch's bucket."""
        longest = int(batch.lengths.max())
        return ragged_key(len(batch.lengths), batch.tokens, longest, min_pad=self._min_pad)

    def num_tokens(self, batch: Batch) -> int:
        """Return a batch's tokens."""
        return batch.tokens

    def eager(self, batch: Batch) -> None:
        """Launch the kernels one by one."""
        self._launch(self.gpu.launches_s, batch.tokens)

    def program(self, key: GraphKey, batch: Batch) -> "SimulatedDevice":
        """Return what computes the bucket."""
        assert self.key(batch) == key
        self._key = key
        return self

    def load(self, batch: Batch) -> None:
        """Note which bucket runs next."""
        self._key = self.key(batch)

    def compute(self) -> None:
        """Launch the bucket's kernels one by one."""
        assert self._key is not None
        self._launch(self.gpu.launches_s, self._key.tokens)

    def output(self, batch: Batch) -> None:
        """Nothing comes of it."""

    def warm(self, function: Callable[[], None]) -> None:
        """Run it."""
        function()

    def capture(self, function: Callable[[], None]) -> SimulatedGraph:
        """Take the time of a capture."""
        assert function
        self.host += self.gpu.capture_s
        return SimulatedGraph(self._replay)

    def _replay(self) -> None:
        assert self._key is not None
        self._launch(self.gpu.replay_s, self._key.tokens)

    def _launch(self, launches_s: float, tokens: int) -> None:
        """The device starts with the first launch and ends after the last."""
        began = self.host
        self.host += launches_s
        self.done = max(self.host, max(began, self.done) + self.gpu.work_s(tokens))


@dataclass
class Run:
    """What a replayed load brought.

    `latencies` of all requests in seconds; `history` has the counters (requests answered, hits,
    captures, batches) after each batch.
    """

    cache: GraphCache[Batch, None]
    latencies: list[float] = field(default_factory=list)
    history: list[tuple[int, int, int, int]] = field(default_factory=list)

    def hit_rate(self, after: int = 0) -> float:
        """Return the share of batches that hit, of those that end after so many requests."""
        before = next((h for h in reversed(self.history) if h[0] <= after), (0, 0, 0, 0))
        last = self.history[-1]
        return (last[1] - before[1]) / max(1, last[3] - before[3])


class Replay:
    """An engine that serves a load: the queue, batches up to a budget, two steps in flight."""

    def __init__(self, load: Load, gpu: Gpu, policy: GraphPolicy, budget: int) -> None:
        """Prepare to serve `load`."""
        self._load = load
        self._budget = budget
        self._device = SimulatedDevice(gpu, policy.min_pad)
        cache = GraphCache(self._device, self._device, policy, lambda: self._device.host)
        self.run_ = Run(cache)
        self._queue = EmbedQueue()
        self._running: deque[tuple[float, list[JobSlice]]] = deque()
        self._answered = 0

    def run(self) -> Run:
        """Serve everything."""
        events = [(float(at), i) for i, at in enumerate(self._load.arrivals)]
        heapq.heapify(events)
        while events or self._running:
            if self._running and (not events or self._running[0][0] <= events[0][0]):
                now, slices = self._running.popleft()
                self._answer(now, slices)
            else:
                now, index = heapq.heappop(events)
                self._admit(now, index)
            self._launch(now)
        return self.run_

    def _admit(self, now: float, index: int) -> None:
        length = self._load.lengths[index : index + 1]
        self._queue.add(EmbedJob(np.zeros(int(length[0]), np.int32), length, arrived=now))

    def _launch(self, now: float) -> None:
        """Launch what there is when the device is idle, and a full batch behind a running one."""
        while self._queue and len(self._running) < STEPS_IN_FLIGHT:
            if self._running and self._queue.tokens < self._budget:
                return
            slices = self._queue.take(self._budget, MAX_TEXTS)
            self._device.host = max(self._device.host, now)
            self.run_.cache.run(Batch(np.concatenate([piece.lengths for piece in slices])))
            self._running.append((self._device.done, slices))

    def _answer(self, now: float, slices: list[JobSlice]) -> None:
        self.run_.latencies += [now - piece.job.arrived for piece in slices]
        self._answered += len(slices)
        counters = self.run_.cache.counters
        batches = counters.hits + counters.captures + counters.eager
        self.run_.history.append((self._answered, counters.hits, counters.captures, batches))


def milliseconds(run: Run, percentile: float) -> str:
    """Return a percentile of the latencies."""
    return f"{1e3 * float(np.percentile(run.latencies, percentile)):.1f}"


def percent(share: float) -> str:
    """Return a share in per cent."""
    return f"{100 * share:.1f} %"


def describe(run: Run) -> list[str]:
    """The cells of a run that tell of its graphs."""
    counters = run.cache.counters
    return [
        f"{run.history[-1][3]:,}",
        percent(run.hit_rate()),
        percent(run.hit_rate(after=SETTLED)),
        f"{counters.captures:,}",
        f"{counters.evictions:,}",
        percent(counters.padding_waste),
    ]


GRAPH_COLUMNS = ("batches", "hits", "later hits", "captures", "evictions", "padding")


def compare_loads(report: Report, runs: dict[float, tuple[Run, Run]]) -> None:
    """Add the table over loads: with graphs, and latencies without."""
    columns = ["requests/s", *GRAPH_COLUMNS, "p50 ms", "p99 ms", "p50 eager", "p99 eager"]
    rows = []
    for rate, (graphs, eager) in runs.items():
        latencies = [milliseconds(run, p) for run in (graphs, eager) for p in (50, 99)]
        rows.append([f"{rate:,.0f}", *describe(graphs), *latencies])
        later = graphs.hit_rate(after=SETTLED)
        report.check(
            f"later hits at {rate:,.0f} requests/s", percent(later), ">= 75 %", later >= 0.75
        )
        waste = graphs.cache.counters.padding_waste
        report.check(f"padding at {rate:,.0f} requests/s", percent(waste), "<= 25 %", waste <= 0.25)
    report.table("Loads", columns, rows)


def compare_policies(report: Report, runs: dict[str, Run], rate: float) -> None:
    """Add the table over limits of the cache."""
    rows = [
        [name, *describe(run), milliseconds(run, 50), milliseconds(run, 99)]
        for name, run in runs.items()
    ]
    columns = ["limits", *GRAPH_COLUMNS, "p50 ms", "p99 ms"]
    report.table(f"Limits, at {rate:,.0f} requests/s", columns, rows)


def draw(runs: dict[float, tuple[Run, Run]], shown: float, path: Path) -> None:
    """Draw hits and captures over the requests of each load, and the grid of one of them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rose", "font.size": 8})
    figure = Figure(figsize=(8, 10), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.6])
    hits, captures = above.subplots(1, 2)
    for rate, (run, _) in runs.items():
        answered, _, captured, _ = np.array(run.history).T
        captures.plot(answered, captured, label=f"{rate:,.0f} requests/s")
        hits.plot(*recent_hits(run), label=f"{rate:,.0f} requests/s")
    hits.set(title="Hits of the last 500 batches, %", xlabel="requests answered", ylim=(0, 100))
    captures.set(title="Graphs captured", xlabel="requests answered")
    captures.legend(fontsize=7)
    axes = below.subplots()
    draw_grid(graph_grids({"embed": runs[shown][0].cache})[0], axes)
    axes.set_title(f"Batches per bucket at {shown:,.0f} requests/s", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def recent_hits(run: Run, window: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Return requests answered, and the per cent of the last batches that hit by then."""
    answered, hits, _, batches = np.array(run.history).T
    before = np.maximum(np.arange(len(hits)) - window, 0)
    shares = (hits - hits[before]) / np.maximum(1, batches - batches[before])
    every = slice(window // 5, None, 20)
    return answered[every], 100 * shares[every]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 400, 1200])
    parser.add_argument("--shown", type=float, default=400, help="the rate of the second table")
    parser.add_argument("--median", type=float, default=80, help="tokens of a text")
    parser.add_argument("--sigma", type=float, default=0.9, help="of the lengths' logarithm")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512, help="tokens of a batch")
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.shown not in options.rates:
        parser.error("--shown has to be one of --rates")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    options = parse(arguments)
    gpu = Gpu()
    limit = measure_inflection(gpu.time_batch)
    loads = {rate: Load.draw(options, rate) for rate in options.rates}

    def replay(rate: float, policy: GraphPolicy) -> Run:
        return Replay(loads[rate], gpu, policy, options.budget).run()

    usual = GraphPolicy(max_tokens=limit)
    never = GraphPolicy(max_tokens=0)
    runs = {rate: (replay(rate, usual), replay(rate, never)) for rate in options.rates}
    policies = {f"usual ({usual.max_graphs} graphs)": runs[options.shown][0]}
    for most in (32, 16, 8):
        policy = GraphPolicy(max_tokens=limit, max_graphs=most)
        policies[f"{most} graphs"] = replay(options.shown, policy)
    full = GraphPolicy(max_tokens=limit, min_pad=0)
    policies["full buckets without a pad token"] = replay(options.shown, full)
    hasty = GraphPolicy(max_tokens=limit, capture_share=1.0)
    policies["captures at any time"] = replay(options.shown, hasty)
    few = GraphPolicy(max_tokens=limit, capture_share=1.0, max_graphs=16)
    policies["16 graphs, captures at any time"] = replay(options.shown, few)
    report = Report(
        "graphs",
        "Device graphs on a simulated GPU",
        f"{options.requests:,} requests of one text each come at random; lengths are lognormal "
        f"(median {options.median:g} tokens, sigma {options.sigma:g}, at most "
        f"{options.longest:,}). Queue, batches of up to {options.budget} tokens and graph cache "
        f"are the engine's own. The device is made up, after a model of 0.6 billion parameters on "
        f"an H200: {1e3 * gpu.launches_s:g} ms to launch an eager pass, {1e3 * gpu.replay_s:g} ms "
        f"a graph, {1e3 * gpu.capture_s:g} ms to capture one, {1e6 * gpu.token_s:g} µs of work a "
        f"token. The inflection point is measured on it: {limit:,} tokens. **None of this has run "
        "on hardware:** hits, captures and padding follow from the cache alone, latencies from "
        "the figures assumed.",
    )
    compare_loads(report, runs)
    compare_policies(report, policies, options.shown)
    report.notes.append(
        f"Hits are batches that replayed a graph; later hits those after the first {SETTLED:,} "
        "requests. Padding is the share of the replayed tokens that fill up a bucket. Captures "
        f"may take {usual.capture_share:.0%} of the time: batches wait behind them, and a cache "
        "that is too small would do little else.\n\n"
        f"![Hits and captures over time, and the buckets]({PICTURE})"
    )
    if options.write_page:
        PAGES.mkdir(parents=True, exist_ok=True)
        draw(runs, options.shown, PAGES / PICTURE)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
