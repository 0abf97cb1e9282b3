"""Scores over a real socket, with a runtime that the test controls."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from msgspec.structs import replace

from rose.models.card import ScoringCard
from rose.runtime.options import EmbedOptions
from rose.serving import protocol
from rose.serving.client_api import EngineError
from rose.serving.replicas import CHUNK_TOKENS, ReplicaSet
from tests.unit.engine_rig import (
    CARD,
    CRASH_ID,
    NAN_ID,
    RunningEngine,
    ToyRuntime,
    connected,
    drive,
    raw,
    served_by,
    texts,
    until,
)

SCORING = ScoringCard(
    kind="cross_encoder",
    labels=("x", "y", "z"),
    activation="identity",
    probabilities="softmax",
    segment_ids=True,
)


class SegmentRuntime(ToyRuntime):
    """A text's scores are (sum of its ids, number of its tokens in segment 1, its length)."""

    def compute(self, batch):
        rows = super().compute(batch)
        singles = batch.singles()
        rows[:, 2] = rows[:, 1]
        for row, single in zip(rows, singles, strict=True):
            row[1] = float(single.segments.sum()) if single.segments is not None else -1.0
        return rows


@pytest.fixture
def runtime():
    runtime = SegmentRuntime()
    yield runtime
    runtime.close()


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/e.sock"


def card(**changes):
    return replace(CARD, tasks=("score",), embedding=None, scoring=replace(SCORING, **changes))


@asynccontextmanager
async def scorer(runtime, address, facts=None, **options):
    served = served_by(None, scoring=runtime, card=facts or card())
    running = RunningEngine(served, address, **options)
    try:
        yield running.server
    finally:
        runtime.gate.set()
        await running.close()
        running.task.result()


def test_scores_and_segments_cross_the_wire(runtime, address):
    async def scenario():
        async with scorer(runtime, address), connected(address) as client:
            await client.wait_ready()
            answer = await client.score(texts([1, 2], [5]), texts([0, 1], [1]))
            assert answer.scores.tolist() == [[3, 1, 2], [5, 1, 1]]
            assert answer.scores.dtype == np.float32
            assert answer.queued_s >= 0
            assert answer.computed_s > 0

    drive(scenario)


def test_a_model_without_segments(runtime, address):
    async def scenario():
        async with scorer(runtime, address, card(segment_ids=False)), connected(address) as client:
            await client.wait_ready()
            answer = await client.score(texts([1, 2], [5]))
            assert answer.scores.tolist() == [[3, -1, 2], [5, -1, 1]]
            with pytest.raises(EngineError, match="takes no segments"):
                await client.score(texts([1]), texts([0]))

    drive(scenario)


@pytest.mark.parametrize(
    ("ids", "segments", "said"),
    [
        ([[1, 2]], None, "segments are needed"),
        ([[1, 2]], [[0, 2]], "0 or 1"),
        ([[1, 2]], [[0, -1]], "0 or 1"),
        ([[1, 2]], [[0]], "one for each token"),
        ([[1, 2]], [[0, 1, 1]], "one for each token"),
        ([[1000]], [[0]], "token ids go from"),
        ([[-1]], [[0]], "token ids go from"),
        ([[1] * 65], [[0] * 65], "the limit is 64"),
        ([[]], [[]], "at least 1"),
    ],
)
def test_what_would_hurt_others_is_refused(runtime, address, ids, segments, said):
    async def scenario():
        async with scorer(runtime, address), connected(address) as client:
            await client.wait_ready()
            with pytest.raises(EngineError, match=said) as caught:
                await client.score(texts(*ids), segments and texts(*segments))
            assert caught.value.kind == "bad_request"
            assert (await client.score(texts([7]), texts([1]))).scores.tolist() == [[7, 1, 1]]

    drive(scenario)


def test_malformed_frames_are_refused(runtime, address):
    async def scenario():
        async with scorer(runtime, address), raw(address) as client:
            await client.hello()
            good = np.ones(1, np.int32).tobytes()
            for number, frames in enumerate(([], [good], [good] * 4, [good, b"abc"], [good, b""])):
                await client.send(protocol.ScoreRequest(request_id=number), *frames)
                failure = await client.receive(protocol.Failure)
                assert (failure.request_id, failure.kind) == (number, "bad_request")

    drive(scenario)


def test_a_model_says_what_it_cannot_do(runtime, address):
    async def scenario():
        async with scorer(runtime, address), connected(address) as client:
            await client.wait_ready()
            with pytest.raises(EngineError, match="cannot embed"):
                await client.embed(texts([1]), EmbedOptions())
        embedder = ToyRuntime()
        running = RunningEngine(served_by(embedder), address + "2")
        async with connected(address + "2") as client:
            await client.wait_ready()
            with pytest.raises(EngineError, match="cannot score"):
                await client.score(texts([1]))
        await running.close()
        embedder.close()

    drive(scenario)


def test_one_engine_embeds_and_scores(runtime, address):
    async def scenario():
        embedder = ToyRuntime()
        facts = replace(card(), tasks=("embed", "score"), embedding=CARD.embedding)
        running = RunningEngine(served_by(embedder, scoring=runtime, card=facts), address)
        async with connected(address) as client:
            await client.wait_ready()
            vectors, scores = await asyncio.gather(
                client.embed(texts([1, 2]), EmbedOptions()),
                client.score(texts([1, 2]), texts([1, 1])),
            )
            assert vectors.vectors.tolist() == [[3, 2, 1]]
            assert scores.scores.tolist() == [[3, 2, 2]]
            await until(lambda: client.stats.steps == 2, timeout=20)
            assert client.stats.tokens == 4
        await running.close()
        embedder.close()

    drive(scenario)


def test_a_text_at_fault_is_named_and_spares_others(runtime, address):
    async def scenario():
        async with scorer(runtime, address), connected(address) as client:
            await client.wait_ready()
            outcomes = await asyncio.gather(
                client.score(texts([1], [NAN_ID]), texts([0], [0])),
                client.score(texts([CRASH_ID]), texts([0])),
                client.score(texts([4]), texts([1])),
                return_exceptions=True,
            )
            assert (outcomes[0].kind, outcomes[0].field) == ("non_finite", "input[1]")
            assert outcomes[1].kind == "internal"
            assert outcomes[2].scores.tolist() == [[4, 1, 1]]

    drive(scenario)


def test_cancelling_and_lateness_free_the_queue(runtime, address):
    async def scenario():
        async with scorer(runtime, address) as server, connected(address) as client:
            await client.wait_ready()
            runtime.gate.clear()
            first = asyncio.create_task(client.score(texts([1]), texts([0])))
            await until(lambda: server._requests == 1)
            waiting = asyncio.create_task(client.score(texts([2] * 9), texts([0] * 9)))
            await until(lambda: server._requests == 2)
            waiting.cancel()
            await until(lambda: server._requests == 1)
            assert server._stats().tokens_queued == 0
            with pytest.raises(EngineError) as caught:
                await client.score(texts([3]), texts([0]), timeout_s=0.05)
            assert caught.value.kind == "deadline"
            await until(lambda: server._requests == 1)
            runtime.gate.set()
            assert (await first).scores.tolist() == [[1, 0, 1]]
            assert server._requests == 0

    drive(scenario)


def test_a_full_queue_refuses(runtime, address):
    async def scenario():
        served = scorer(runtime, address, max_queue_tokens=8)
        async with served as server, connected(address) as client:
            await client.wait_ready()
            runtime.gate.clear()
            tasks = []
            for i in range(2):
                tasks.append(asyncio.create_task(client.score(texts([i] * 6), texts([0] * 6))))
                await until(lambda n=i + 1: server._requests == n)
                await until(lambda n=i: server._stats().tokens_queued == 6 * n)
            with pytest.raises(EngineError) as caught:
                await client.score(texts([3] * 6), texts([0] * 6))
            assert caught.value.kind == "overloaded"
            runtime.gate.set()
            await asyncio.gather(*tasks)

    drive(scenario)


def test_a_list_is_split_over_replicas_and_comes_back_in_order(address):
    async def scenario():
        runtimes = [SegmentRuntime(), SegmentRuntime()]
        addresses = [f"{address}{i}" for i in range(2)]
        engines = [
            RunningEngine(served_by(None, 256, scoring=one, card=card()), at)
            for one, at in zip(runtimes, addresses, strict=True)
        ]
        async with connected(addresses[0]) as one, connected(addresses[1]) as other:
            await one.wait_ready()
            await other.wait_ready()
            replicas = ReplicaSet([one, other])
            count = 3 * CHUNK_TOKENS // 40
            ids = texts(*[[i % 900] * 40 for i in range(count)])
            parts = texts(*[[0] * (i % 40) + [1] * (40 - i % 40) for i in range(count)])
            answer = await replicas.score(ids, parts)
            expected = [[i % 900 * 40, 40 - i % 40, 40] for i in range(count)]
            assert answer.scores.tolist() == expected
            assert all(one.batches for one in runtimes)
            ids[count - 1] = np.array([NAN_ID], np.int32)
            parts[count - 1] = np.array([0], np.int32)
            with pytest.raises(EngineError) as caught:
                await replicas.score(ids, parts)
            assert caught.value.field == f"input[{count - 1}]"
        for engine, runtime in zip(engines, runtimes, strict=True):
            await engine.close()
            runtime.close()

    drive(scenario)
