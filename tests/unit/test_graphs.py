"""The graph cache: buckets, states, budgets, failures; runtimes that use it give the same."""

import itertools
from collections import Counter, OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from rose.kernels.attention.torch_sdpa import TorchSdpaBackend
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.fixed_inputs import FixedInputs
from rose.runtime.graph_setup import decode_with_graphs, embed_with_graphs
from rose.runtime.graphs import (
    INFLECTION_SIZES,
    BatchTime,
    GraphCache,
    GraphKey,
    GraphPolicy,
    GraphState,
    WarmupShape,
    decode_key,
    measure_inflection,
    parse_warmup,
    ragged_key,
)
from rose.runtime.worker import DeviceWorker
from tests.fake_device import FakeDevice
from tests.graph_rig import CallCapturer, CallGraph, FixedSdpaBackend

# Buckets


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40), min_pad=st.sampled_from([0, 1])
)
def test_a_batch_fits_its_bucket_with_little_padding(lengths, min_pad):
    tokens, longest = sum(lengths), max(lengths)
    key = ragged_key(len(lengths), tokens, longest, min_pad=min_pad)
    pad, step = key.tokens - tokens, 64 if key.tokens <= 1024 else 256
    assert min_pad <= pad < step + min_pad
    assert key.tokens % step == 0
    assert len(lengths) <= key.sequences < 2 * len(lengths)
    assert max(longest, pad) <= key.max_seqlen <= key.tokens


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ((1, 1, 1), (1, 64, 64)),
        ((1, 63, 63), (1, 64, 64)),
        ((1, 64, 64), (1, 128, 64)),  # the pad sequence has a token of its own
        ((1, 300, 300), (1, 320, 320)),
        ((5, 300, 90), (8, 320, 128)),
        ((3, 1023, 700), (4, 1024, 1024)),
        ((3, 1024, 700), (4, 1280, 1024)),
        ((17, 2000, 129), (32, 2048, 256)),
    ],
)
def test_buckets_of_ragged_batches(batch, key):
    assert ragged_key(*batch) == GraphKey(*key)


def test_without_a_pad_token_a_full_bucket_has_no_padding():
    assert ragged_key(1, 512, 512, min_pad=0) == GraphKey(1, 512, 512)
    assert ragged_key(1, 512, 512, min_pad=1) == GraphKey(1, 576, 512)


def test_buckets_of_decode_steps():
    sizes = [decode_key(n).sequences for n in (1, 2, 3, 5, 8, 9, 17, 30, 33)]
    assert sizes == [1, 2, 4, 8, 8, 16, 24, 32, 40]
    assert decode_key(5) == GraphKey(8, 8, 1)


@pytest.mark.parametrize("limits", [{"max_graphs": 0}, {"max_bytes": 0}, {"capture_share": 0}])
def test_a_policy_without_room_is_refused(limits):
    with pytest.raises(ValueError, match="at least one graph"):
        GraphPolicy(max_tokens=64, **limits)


# The cache alone, over batches of (bucket, tokens, value)


class Values:
    """A forward pass that returns the batch's value, and from where. `fail` is the next failure."""

    def __init__(self):
        self.fail = None

    def key(self, batch):
        return GraphKey(batch[0], 64 * batch[0], 64)

    def num_tokens(self, batch):
        return batch[1]

    def eager(self, batch):
        self.maybe_fail("eager")
        return "eager", batch[2]

    def program(self, key, batch):
        self.maybe_fail("program")
        return Fixed(self, key, batch)

    def maybe_fail(self, what):
        if self.fail == what:
            self.fail = None
            raise RuntimeError(f"{what} failed")


class Fixed:
    def __init__(self, forward, key, batch):
        self.forward, self.key_, self.input, self.out = forward, key, batch[2], None
        assert forward.key(batch) == key

    def load(self, batch):
        self.forward.maybe_fail("load")
        assert self.forward.key(batch) == self.key_
        self.input = batch[2]

    def compute(self):
        self.forward.maybe_fail("compute")
        self.out = self.input

    def output(self, batch):
        return "graph", self.out


def batch(bucket, value, tokens=None):
    return bucket, tokens or 64 * bucket - 4, value


def make(*, clock=lambda: 0.0, **limits):
    forward, capturer = Values(), CallCapturer()
    policy = GraphPolicy(**({"max_tokens": 10_000} | limits))
    return GraphCache(forward, capturer, policy, clock), forward, capturer


def states(cache):
    return {entry.key.sequences: entry.state.value for entry in cache.snapshot()}


def test_first_eager_then_captured_then_replayed():
    cache, _, capturer = make()
    assert cache.run(batch(1, "a")) == ("eager", "a")
    assert states(cache) == {1: "warm"}
    assert not capturer.graphs
    assert cache.run(batch(1, "b")) == ("graph", "b")
    assert states(cache) == {1: "captured"}
    assert [cache.run(batch(1, v)) for v in "cd"] == [("graph", "c"), ("graph", "d")]
    assert len(capturer.graphs) == capturer.warmed == 1
    counters = cache.counters
    assert (counters.eager, counters.captures, counters.hits) == (1, 1, 2)
    assert (counters.tokens, counters.padding_tokens) == (3 * 60, 3 * 4)
    assert counters.hit_rate == 0.5
    assert counters.padding_waste == 4 / 64
    assert cache.snapshot()[0].batches == 4


def test_above_the_inflection_point_always_eager():
    cache, _, capturer = make(max_tokens=100, max_sequences=8)
    for _ in range(4):
        assert cache.run(batch(2, "x", tokens=101))[0] == "eager"
        assert cache.run(batch(9, "x", tokens=9))[0] == "eager"  # too many sequences
    assert not capturer.graphs
    assert cache.snapshot() == []
    assert [cache.run(batch(2, "x", tokens=100))[0] for _ in range(2)] == ["eager", "graph"]


def test_the_least_recently_used_graph_makes_room():
    cache, _, capturer = make(max_graphs=2)
    cache.warmup([batch(1, "a"), batch(2, "b")])
    cache.run(batch(1, "a"))
    cache.warmup([batch(3, "c")])
    assert states(cache) == {1: "captured", 2: "cold", 3: "captured"}
    assert [graph.released for graph in capturer.graphs] == [False, True, False]
    assert cache.counters.evictions == 1
    assert [cache.run(batch(2, "b"))[0] for _ in range(2)] == ["eager", "graph"]
    assert states(cache)[1] == "cold"


def test_a_budget_of_bytes():
    cache, _, capturer = make(max_bytes=100)
    sizes = iter([60, 30, 50, 101])
    capturer.capture = lambda function: (
        capturer.graphs.append(CallGraph(function, next(sizes))) or capturer.graphs[-1]
    )
    cache.warmup([batch(1, "a"), batch(2, "b")])
    assert cache.num_bytes == 90
    cache.warmup([batch(3, "c")])
    assert states(cache) == {1: "cold", 2: "captured", 3: "captured"}
    assert cache.num_bytes == 80
    assert [cache.run(batch(4, "d"))[0] for _ in range(3)] == ["eager"] * 3  # never fits
    assert states(cache)[4] == "failed"
    assert cache.num_bytes == 80


@pytest.mark.parametrize("fails", [False, True])
def test_captures_take_their_share_of_the_time_and_no_more(fails):
    now = [0.0]
    cache, _, capturer = make(clock=lambda: now[0], capture_share=0.25)
    warm = capturer.warm

    def slow(function):
        now[0] += 2.0
        if fails:
            raise RuntimeError("no")
        warm(function)

    capturer.warm = slow
    for bucket in (1, 2):
        cache.run(batch(bucket, "a"))
    assert cache.run(batch(1, "b"))[0] == ("eager" if fails else "graph")
    now[0] = 7.9  # two seconds of eight
    assert cache.run(batch(2, "c")) == ("eager", "c")
    assert states(cache)[2] == "warm"
    if not fails:
        assert cache.run(batch(1, "d")) == ("graph", "d")  # replays go on
    now[0] = 8.0
    cache.run(batch(2, "e"))
    assert states(cache)[2] == ("failed" if fails else "captured")
    cache.warmup([batch(3, "f")])  # before there are requests nobody waits
    assert states(cache)[3] == ("failed" if fails else "captured")


@pytest.mark.parametrize("what", ["program", "compute", "warm", "capture"])
def test_a_failed_capture_never_disturbs_its_batch(what, caplog):
    cache, forward, capturer = make()
    cache.run(batch(1, "a"))
    target = capturer if what in ("warm", "capture") else forward
    target.fail = what
    assert cache.run(batch(1, "b")) == ("eager", "b")
    assert f"{what} failed" in caplog.text
    assert [cache.run(batch(1, v)) for v in "cd"] == [("eager", "c"), ("eager", "d")]
    assert states(cache) == {1: "failed"}
    assert cache.counters.failures == 1
    cache.warmup([batch(2, "e")])  # others are not concerned
    assert states(cache) == {1: "failed", 2: "captured"}


@pytest.mark.parametrize("what", ["load", "compute"])
def test_a_failed_replay_runs_eagerly_and_lets_the_graph_go(what):
    cache, forward, capturer = make()
    cache.warmup([batch(1, "a")])
    forward.fail = what
    assert cache.run(batch(1, "b")) == ("eager", "b")
    assert states(cache) == {1: "failed"}
    assert capturer.graphs[0].released
    assert cache.num_bytes == 0


def test_an_error_of_the_batch_itself_is_raised():
    cache, forward, _ = make()
    forward.fail = "eager"
    with pytest.raises(RuntimeError, match="eager failed"):
        cache.run(batch(1, "a"))
    assert cache.run(batch(1, "b"))[1] == "b"


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of hits, evictions and failures, against a plain model of the rules."""

    @initialize(max_graphs=st.integers(1, 3), max_bytes=st.integers(1, 12))
    def start(self, max_graphs, max_bytes):
        self.policy = GraphPolicy(max_tokens=300, max_graphs=max_graphs, max_bytes=max_bytes)
        self.forward, self.capturer = Values(), CallCapturer()
        self.size = 1
        capture = self.capturer.capture

        def sized(function):
            graph = capture(function)
            graph.num_bytes = self.size
            return graph

        self.capturer.capture = sized
        self.cache = GraphCache(self.forward, self.capturer, self.policy, lambda: 0.0)
        self.model = {}
        self.captured = OrderedDict()
        self.counts = Counter()
        self.number = 0

    @rule(
        bucket=st.integers(1, 6),
        size=st.integers(1, 6),
        fail=st.sampled_from([None] * 6 + ["program", "warm", "capture", "load", "compute"]),
    )
    def run(self, bucket, size, fail):
        self.number += 1
        self.size = size
        self.forward.fail = fail if fail in ("program", "load", "compute") else None
        self.capturer.fail = fail if fail in ("warm", "capture") else None
        where, value = self.cache.run(batch(bucket, self.number))
        assert value == self.number
        assert where == self.expected(bucket, size, fail)
        self.forward.fail = self.capturer.fail = None

    def expected(self, bucket, size, fail):
        if 64 * bucket - 4 > self.policy.max_tokens:
            self.counts["eager"] += 1
            return "eager"
        state = self.model.get(bucket, "cold")
        if state == "captured":
            ok = fail not in ("load", "compute")
            self.captured.move_to_end(bucket)
            self.counts["hits"] += ok
            if not ok:
                del self.captured[bucket]
        elif state == "warm":
            ok = self.expect_capture(bucket, size, fail)
            self.counts["captures"] += ok
        else:
            self.model[bucket] = "warm" if state == "cold" else "failed"
            self.counts["eager"] += 1
            return "eager"
        self.model[bucket] = "captured" if ok else "failed"
        self.counts["eager"] += not ok
        return "graph" if ok else "eager"

    def expect_capture(self, bucket, size, fail):
        while len(self.captured) >= self.policy.max_graphs:
            self.expect_eviction()
        if fail in ("program", "warm", "capture", "compute") or size > self.policy.max_bytes:
            return False
        self.captured[bucket] = size
        while sum(self.captured.values()) > self.policy.max_bytes:
            self.expect_eviction()
        return True

    def expect_eviction(self):
        bucket, _ = self.captured.popitem(last=False)
        self.model[bucket] = "cold"
        self.counts["evictions"] += 1

    @invariant()
    def states_and_counts_are_those_of_the_model(self):
        if hasattr(self, "cache"):
            assert states(self.cache) == self.model
            counters = self.cache.counters
            for name in ("hits", "captures", "evictions", "eager"):
                assert getattr(counters, name) == self.counts[name]
            assert counters.hits + counters.captures + counters.eager == self.number

    @invariant()
    def budgets_hold_and_graphs_live_as_long_as_their_buckets(self):
        if hasattr(self, "cache"):
            alive = [graph for graph in self.capturer.graphs if not graph.released]
            assert len(alive) == len(self.captured) <= self.policy.max_graphs
            assert sum(graph.num_bytes for graph in alive) == self.cache.num_bytes
            assert self.cache.num_bytes <= self.policy.max_bytes
            for entry in self.cache.snapshot():
                captured = entry.state is GraphState.CAPTURED
                assert captured == (entry.graph is not None) == (entry.program is not None)


def test_any_sequence_of_hits_evictions_and_failures():
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


# The inflection point


def test_the_inflection_point_is_where_the_device_takes_longer_than_the_launches():
    calls = []

    def time_batch(tokens):
        calls.append(tokens)
        jitter = 0.0001 * (len(calls) % 3)
        device = 5e-6 * tokens
        return BatchTime(0.002 + jitter, max(0.002, device) + jitter + 0.00001)

    assert measure_inflection(time_batch) == 512  # 2.56 ms of work, 2 ms of launches
    assert max(calls) == 512
    assert measure_inflection(lambda _: BatchTime(1.0, 1.0), [64, 128]) == 128
    assert measure_inflection(lambda _: BatchTime(1.0, 2.0)) == 64


# Warm-up lists


def test_warmup_lists():
    assert parse_warmup("1x128, 8x64,16") == (
        WarmupShape(1, 128),
        WarmupShape(8, 64),
        WarmupShape(16, None),
    )
    assert parse_warmup(None) == parse_warmup("") == ()


@pytest.mark.parametrize("text", ["0x5", "x5", "5x", "1x2x3", "a", "1,,2"])
def test_a_wrong_warmup_list_is_named(text):
    with pytest.raises(ValueError, match="--warmup"):
        parse_warmup(text)


# Fixed inputs


def test_fixed_inputs_stay_in_place():
    fields = {"a": (torch.int32, (3,)), "b": (torch.int64, (2, 2)), "c": (torch.int32, (1,))}
    inputs = FixedInputs(torch.device("cpu"), fields)
    places = {name: inputs[name].data_ptr() for name in fields}
    assert all(place % 16 == places["a"] % 16 for place in places.values())
    for start in (0, 7):
        arrays = {
            "a": np.arange(start, start + 3, dtype=np.int32),
            "b": np.arange(start, start + 4).reshape(2, 2),
            "c": np.array([start], np.int32),
        }
        inputs.fill(**arrays)
        for name, array in arrays.items():
            assert inputs[name].tolist() == array.tolist()
            assert inputs[name].data_ptr() == places[name]
    with pytest.raises(AssertionError, match="a"):
        inputs.fill(a=np.zeros(2, np.int32), b=np.zeros((2, 2), np.int64), c=np.zeros(1, np.int32))


# The embedding runtime with graphs


class Sums:
    """A model whose vector is (sum of the ids, sum of positions, length, pool_from); keeps shapes."""

    dimensions = 4

    def __init__(self):
        self.slots = []

    def __call__(self, tokens, cu_seqlens, pool_from):
        ends = cu_seqlens.tolist()
        self.slots.append([b - a for a, b in itertools.pairwise(ends)])
        assert ends[-1] == len(tokens.input_ids) == len(tokens.positions)
        parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        skipped = torch.zeros(len(parts)) if pool_from is None else pool_from.float()
        columns = [
            torch.stack([tokens.input_ids[part].sum() for part in parts]).float(),
            torch.stack([tokens.positions[part].sum() for part in parts]).float(),
            cu_seqlens.diff().float(),
            skipped,
        ]
        return torch.stack(columns, dim=1)


def embed_batch(lengths, seed=0, pool_from=0):
    ids = np.random.default_rng(seed).integers(1, 90, sum(lengths), dtype=np.int32)
    lengths = np.array(lengths, np.int32)
    return EmbedBatch(ids, lengths, np.full(len(lengths), pool_from, np.int32))


@pytest.fixture
def runtime():
    worker = DeviceWorker()
    model = Sums()
    runtime = EmbeddingRuntime(model, FixedSdpaBackend(), worker)
    runtime.use_graphs(CallCapturer(), policy(512))
    yield runtime, model
    worker.close()


def policy(max_tokens, **limits):
    """Captures may take all the time there is."""
    return GraphPolicy(max_tokens=max_tokens, capture_share=1.0, **limits)


def eager_rows(batch):
    rows, start = [], 0
    for length, skipped in zip(batch.lengths.tolist(), batch.pool_from.tolist(), strict=True):
        ids = batch.ids[start : start + length]
        rows.append([float(ids.sum()), length * (length - 1) / 2, float(length), float(skipped)])
        start += length
    return rows


def test_padding_is_empty_sequences_then_one_pad_sequence(runtime):
    runtime, model = runtime
    for _ in range(2):
        runtime.step(embed_batch([9, 40, 5])).result(5)
    assert model.slots[0] == [5, 9, 40]  # eager: as it is
    assert set(map(tuple, model.slots[1:])) == {(5, 9, 40, 0, 10)}
    runtime.step(embed_batch([20, 43])).result(5)
    runtime.step(embed_batch([20, 43])).result(5)
    assert model.slots[-1] == [20, 43, 1]


@settings(max_examples=30, deadline=None)
@given(
    batches=st.lists(
        st.tuples(
            st.lists(st.integers(1, 60), min_size=1, max_size=9),
            st.integers(0, 3),
        ),
        min_size=4,
        max_size=12,
    )
)
def test_replayed_rows_are_those_of_the_texts(batches):
    worker = DeviceWorker()
    try:
        runtime = EmbeddingRuntime(Sums(), FixedSdpaBackend(), worker)
        runtime.use_graphs(CallCapturer(), policy(300, max_graphs=2))
        for seed, (lengths, pool_from) in enumerate(batches * 2):
            batch = embed_batch(lengths, seed, pool_from)
            assert runtime.step(batch).result(5).tolist() == eager_rows(batch)
        counters = runtime.graphs.counters
        assert counters.captures + counters.hits + counters.eager == 2 * len(batches)
    finally:
        worker.close()


def test_results_of_a_graph_survive_the_next_replay():
    """Two steps in flight share the graph's output; what the host reads was copied before."""
    device = FakeDevice()
    worker = DeviceWorker(device)
    runtime = EmbeddingRuntime(Sums(), FixedSdpaBackend(), worker)
    runtime.use_graphs(CallCapturer(), policy(512))
    batches = [embed_batch(lengths, seed) for seed in range(6) for lengths in ([3, 4], [5])]
    with device.running():
        results = []
        for wave in (batches[:6], batches[6:]):  # the second uses the buffers of the first again
            results += [lazy.result(5) for lazy in [runtime.step(batch) for batch in wave]]
        worker.close()
    assert [rows.tolist() for rows in results] == [eager_rows(batch) for batch in batches]
    assert runtime.graphs.counters.hits == 8


def test_warm_up_captures_before_the_first_request(runtime):
    runtime, _ = runtime
    runtime.warm_up([WarmupShape(1, 100), WarmupShape(4, 16), WarmupShape(3, None)], 90)
    assert states_of(runtime) == {(1, 128, 128): "captured", (4, 128, 64): "captured"}
    runtime.step(embed_batch([90])).result(5)
    assert runtime.graphs.counters.hits == 1


def states_of(runtime):
    return {tuple(entry.key): entry.state.value for entry in runtime.graphs.snapshot()}


def test_warm_up_without_graphs_runs_each_shape_once():
    worker, model = DeviceWorker(), Sums()
    runtime = EmbeddingRuntime(model, FixedSdpaBackend(), worker)
    runtime.warm_up([WarmupShape(2, 5), WarmupShape(7, None)], 90)
    worker.close()
    assert model.slots == [[5, 5]]
    assert runtime.graphs is None


def test_timing_a_batch_waits_for_the_device():
    device = FakeDevice()
    worker = DeviceWorker(device)
    runtime = EmbeddingRuntime(Sums(), FixedSdpaBackend(), worker)
    with device.running(seconds_per_step=0.05):
        time = runtime.time_batch(200, max_len=64, vocab_size=90)
        worker.close()
    assert time.done - time.launched >= 0.05


# Set-up


def test_set_up_measures_the_limit_or_takes_it():
    worker = DeviceWorker()
    card = SimpleNamespace(max_model_len=64, vocab_size=90)
    for wanted, limit in ((None, INFLECTION_SIZES[-1]), (256, 256)):
        runtime = EmbeddingRuntime(Sums(), FixedSdpaBackend(), worker)
        embed_with_graphs(runtime, card, CallCapturer(), wanted)
        assert runtime.graphs.policy.max_tokens == limit  # a CPU is done when its launches are
    worker.close()


def test_set_up_leaves_alone_what_cannot_be_captured():
    worker = DeviceWorker()
    card = SimpleNamespace(max_model_len=64, vocab_size=90)
    for backend, deterministic in ((TorchSdpaBackend(), False), (FixedSdpaBackend(), True)):
        runtime = EmbeddingRuntime(Sums(), backend, worker, deterministic=deterministic)
        embed_with_graphs(runtime, card, CallCapturer(), 256)
        assert runtime.graphs is None
    worker.close()


def test_set_up_of_decode_steps_follows_the_number_of_sequences():
    class Decode:
        can_use_graphs = True

        def use_graphs(self, capturer, policy, max_len):
            self.policy, self.max_len = policy, max_len

    runtime = Decode()
    decode_with_graphs(runtime, CallCapturer(), 300, 4096)
    assert (runtime.policy.max_tokens, runtime.policy.max_sequences) == (300, 304)
    assert runtime.max_len == 4096
    runtime.can_use_graphs, runtime.policy = False, None
    decode_with_graphs(runtime, CallCapturer(), 300, 4096)
    assert runtime.policy is None
