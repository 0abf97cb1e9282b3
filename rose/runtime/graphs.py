"""The graph cache: which batches run as a captured device graph, and which eagerly.

A graph replays a forward pass of fixed shape in one launch, so batches are padded into buckets.
Each bucket is a small state machine:

    cold --1st batch: eager--> warm --2nd: capture, replay--> captured --replay--> captured
                                 |                               |
                                 +--capture fails--> failed      +--evicted--> cold

Batches above the inflection point, from which the device takes longer than the launches, run
eagerly, as do those of a failed bucket, and those of a warm one as long as captures have had their
share of the time. This file knows no torch: what captures is injected.
"""

import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

log = logging.getLogger(__name__)

BatchT = TypeVar("BatchT")
BatchT_contra = TypeVar("BatchT_contra", contravariant=True)
OutT = TypeVar("OutT")
OutT_co = TypeVar("OutT_co", covariant=True)

FINE_STEP, COARSE_STEP, FINE_LIMIT = 64, 256, 1024  # token buckets
MAX_SEQUENCES = 256


class GraphKey(NamedTuple):
    """What is baked into a graph: sequences and tokens, and the bound of a sequence's length.

    The pad sequence of a ragged bucket is not counted in `sequences`, its tokens are in `tokens`.
    """

    sequences: int
    tokens: int
    max_seqlen: int


def ragged_key(num_sequences: int, num_tokens: int, longest: int, *, min_pad: int = 1) -> GraphKey:
    """Return the bucket of a ragged batch.

    Padding in a bucket follows the real sequences: empty ones, then one pad sequence of at least
    `min_pad` tokens. It is never longer than `max_seqlen`.
    """
    step = FINE_STEP if num_tokens + min_pad <= FINE_LIMIT else COARSE_STEP
    tokens = _round_up(num_tokens + min_pad, step)
    sequences = _power_of_two(num_sequences)
    return GraphKey(sequences, tokens, min(max(_power_of_two(longest), step), tokens))


def decode_key(num_sequences: int) -> GraphKey:
    """Return the bucket of a step in which every sequence has one new token."""
    size = _power_of_two(num_sequences) if num_sequences <= 8 else _round_up(num_sequences, 8)
    return GraphKey(size, size, 1)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPolicy:
    """Limits of a graph cache.

    Attributes:
        max_tokens: batches of more tokens run eagerly: the inflection point.
        max_sequences: batches of more sequences run eagerly.
        max_graphs: graphs at one time; the least recently used one is evicted.
        max_bytes: device memory of all graphs together.
        min_pad: tokens that a ragged bucket's pad sequence has at least.
        capture_share: share of the time that captures may take; batches wait behind them.
    """

    max_tokens: int
    max_sequences: int = MAX_SEQUENCES
    max_graphs: int = 64
    max_bytes: int = 2 << 30
    min_pad: int = 1
    capture_share: float = 0.1

    def __post_init__(self) -> None:
        """Check what a user can set.

        Raises:
            ValueError: a limit leaves no room for a graph.
        """
        if self.max_graphs < 1 or self.max_bytes < 1 or not 0 < self.capture_share <= 1:
            raise ValueError("a graph cache needs room and time for at least one graph")


class Graph(Protocol):
    """A captured graph; `num_bytes` of device memory are its own."""

    num_bytes: int

    def replay(self) -> None:
        """Launch it."""
        ...

    def release(self) -> None:
        """Free it. A replay that is still running finishes."""
        ...


class Capturer(Protocol):
    """Makes graphs on a device."""

    def warm(self, function: Callable[[], None]) -> None:
        """Call `function` where captures happen, so that it compiles and sizes what it needs."""
        ...

    def capture(self, function: Callable[[], None]) -> Graph:
        """Record what `function` launches. Work that runs meanwhile goes on.

        Raises:
            RuntimeError: it cannot be captured; the device is as it was.
        """
        ...


class Program(Protocol[BatchT_contra, OutT_co]):
    """A model's forward pass in one bucket, from fixed inputs to fixed outputs."""

    def load(self, batch: BatchT_contra) -> None:
        """Bring a batch of this bucket into the inputs, padded."""
        ...

    def compute(self) -> None:
        """Run the model from the inputs to the outputs: what a graph holds."""
        ...

    def output(self, batch: BatchT_contra) -> OutT_co:
        """Return the batch's own rows of the outputs, without padding; valid until the next run."""
        ...


class Forward(Protocol[BatchT_contra, OutT_co]):
    """What the cache runs: a model's forward pass over batches of any shape."""

    def key(self, batch: BatchT_contra) -> GraphKey:
        """Return the bucket of a batch."""
        ...

    def num_tokens(self, batch: BatchT_contra) -> int:
        """Return the tokens of a batch, without padding."""
        ...

    def eager(self, batch: BatchT_contra) -> OutT_co:
        """Run a batch as it is."""
        ...

    def program(self, key: GraphKey, batch: BatchT_contra) -> Program[BatchT_contra, OutT_co]:
        """Make the fixed forward pass of a bucket, with `batch` loaded."""
        ...


class GraphState(Enum):
    """Where a bucket is."""

    COLD = "cold"
    WARM = "warm"
    CAPTURED = "captured"
    FAILED = "failed"


@dataclass(slots=True)
class GraphCounters:
    """What happened so far. Every batch is one of `hits`, `captures` and `eager`.

    `tokens` and `padding_tokens` are those of replayed batches.
    """

    hits: int = 0
    captures: int = 0
    evictions: int = 0
    failures: int = 0
    eager: int = 0
    tokens: int = 0
    padding_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the batches that replayed a graph of an earlier batch."""
        return self.hits / max(1, self.hits + self.captures + self.eager)

    @property
    def padding_waste(self) -> float:
        """Share of the replayed tokens that were padding."""
        return self.padding_tokens / max(1, self.tokens + self.padding_tokens)


@dataclass(slots=True)
class GraphEntry(Generic[BatchT, OutT]):
    """A bucket: its state, and how many batches fell into it."""

    key: GraphKey
    state: GraphState = GraphState.COLD
    batches: int = 0
    program: Program[BatchT, OutT] | None = field(default=None, repr=False)
    graph: Graph | None = field(default=None, repr=False)


class GraphTooLargeError(RuntimeError):
    """A single graph is larger than all graphs together may be."""


class GraphCache(Generic[BatchT, OutT]):
    """Runs batches of one model, as graphs where that pays. To be used from one thread."""

    def __init__(
        self,
        forward: Forward[BatchT, OutT],
        capturer: Capturer,
        policy: GraphPolicy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start with all buckets cold; `clock` tells seconds."""
        self.policy = policy
        self.counters = GraphCounters()
        self._forward = forward
        self._capturer = capturer
        self._entries: dict[GraphKey, GraphEntry[BatchT, OutT]] = {}
        self._captured: OrderedDict[GraphKey, Graph] = OrderedDict()  # least recently used first
        self._clock = clock
        self._next_capture = -math.inf

    @property
    def num_bytes(self) -> int:
        """Device memory of the graphs."""
        return sum(graph.num_bytes for graph in self._captured.values())

    def run(self, batch: BatchT) -> OutT:
        """Run a batch; what it returns is valid until the next run."""
        entry = self._enter(batch)
        if entry is not None and self._runs_as_graph(entry):
            try:
                return self._replay(entry, batch)
            except Exception as error:  # noqa: BLE001 - the batch runs eagerly instead
                log.warning("no graph for %s: %s", entry.key, error)
                self._give_up(entry)
        elif entry is not None and entry.state is GraphState.COLD:
            entry.state = GraphState.WARM
        self.counters.eager += 1
        return self._forward.eager(batch)

    def warmup(self, batches: Iterable[BatchT]) -> None:
        """Run batches until their graphs are captured or known to fail."""
        for batch in batches:
            for _ in range(2):  # the first run is eager
                self._next_capture = -math.inf
                self.run(batch)

    def snapshot(self) -> list[GraphEntry[BatchT, OutT]]:
        """Return the buckets that batches fell into; may be called from any thread."""
        return sorted(self._entries.values(), key=lambda entry: entry.key)

    def _enter(self, batch: BatchT) -> GraphEntry[BatchT, OutT] | None:
        """Find the bucket of a batch; None if batches like it never run as graphs."""
        if self._forward.num_tokens(batch) > self.policy.max_tokens:
            return None
        key = self._forward.key(batch)
        if key.sequences > self.policy.max_sequences:
            return None
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = GraphEntry(key)
        entry.batches += 1
        return entry

    def _runs_as_graph(self, entry: GraphEntry[BatchT, OutT]) -> bool:
        if entry.state is GraphState.WARM:
            return self._clock() >= self._next_capture
        return entry.state is GraphState.CAPTURED

    def _replay(self, entry: GraphEntry[BatchT, OutT], batch: BatchT) -> OutT:
        captured = entry.state is GraphState.CAPTURED
        if captured:
            assert entry.program is not None
            self._captured.move_to_end(entry.key)
            entry.program.load(batch)
        else:
            self._capture(entry, batch)
        assert entry.program is not None
        assert entry.graph is not None
        entry.graph.replay()
        output = entry.program.output(batch)
        self._count(entry.key, self._forward.num_tokens(batch), hit=captured)
        return output

    def _count(self, key: GraphKey, tokens: int, *, hit: bool) -> None:
        self.counters.hits += hit
        self.counters.captures += not hit
        self.counters.tokens += tokens
        self.counters.padding_tokens += key.tokens - tokens

    def _capture(self, entry: GraphEntry[BatchT, OutT], batch: BatchT) -> None:
        """Capture the graph of a bucket, evicting others where the budget asks for it."""
        began = self._clock()
        try:
            self._make_graph(entry, batch)
        finally:
            ended = self._clock()
            self._next_capture = ended + (ended - began) * (1 / self.policy.capture_share - 1)

    def _make_graph(self, entry: GraphEntry[BatchT, OutT], batch: BatchT) -> None:
        while len(self._captured) >= self.policy.max_graphs:
            self._evict_oldest()
        program = self._forward.program(entry.key, batch)
        self._capturer.warm(program.compute)
        graph = self._capturer.capture(program.compute)
        entry.program, entry.graph, entry.state = program, graph, GraphState.CAPTURED
        self._captured[entry.key] = graph
        if graph.num_bytes > self.policy.max_bytes:
            raise GraphTooLargeError(f"it takes {graph.num_bytes} bytes")
        while self.num_bytes > self.policy.max_bytes:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        self._drop(self._entries[next(iter(self._captured))], GraphState.COLD)
        self.counters.evictions += 1

    def _give_up(self, entry: GraphEntry[BatchT, OutT]) -> None:
        self._drop(entry, GraphState.FAILED)
        self.counters.failures += 1

    def _drop(self, entry: GraphEntry[BatchT, OutT], state: GraphState) -> None:
        graph = self._captured.pop(entry.key, None)
        entry.state, entry.graph, entry.program = state, None, None
        if graph is not None:
            graph.release()


class BatchTime(NamedTuple):
    """Seconds from a batch's first launch to its last, and to the end of its work."""

    launched: float
    done: float


INFLECTION_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
INFLECTION_MARGIN = 0.1
INFLECTION_RUNS = 3


def measure_inflection(
    time_batch: Callable[[int], BatchTime], sizes: Sequence[int] = INFLECTION_SIZES
) -> int:
    """Find the number of tokens from which the device takes longer than the launches.

    As long as the device waits for launches it is done when they are; above the point it is not.

    Args:
        time_batch: runs a batch of that many tokens eagerly and alone.
        sizes: numbers of tokens to try, ascending; the last one is the answer if none suffices.
    """
    for tokens in sizes:
        times = [time_batch(tokens) for _ in range(INFLECTION_RUNS)]
        launched = min(time.launched for time in times)
        if min(time.done for time in times) > (1 + INFLECTION_MARGIN) * launched:
            return tokens
    return sizes[-1]


class WarmupShape(NamedTuple):
    """A batch to warm up with: texts of `tokens` each, or, without, a step of decoding."""

    sequences: int
    tokens: int | None


def parse_warmup(text: str | None) -> tuple[WarmupShape, ...]:
    """Read a list like 1x128,8x64,16: one text of 128 tokens, 8 of 64, a decode step of 16.

    Raises:
        ValueError: it is none.
    """
    shapes = []
    for item in text.split(",") if text else ():
        match = re.fullmatch(r"\s*([1-9]\d*)(?:x([1-9]\d*))?\s*", item)
        if match is None:
            raise ValueError(f"--warmup: {item!r} is neither TEXTSxTOKENS nor SEQUENCES")
        shapes.append(WarmupShape(int(match[1]), int(match[2]) if match[2] else None))
    return tuple(shapes)
