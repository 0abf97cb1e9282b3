"""Spans of texts on their way through client, wire, queue and batches, with a toy runtime."""

import asyncio

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rose.models.card import LateInteraction, QueryExpansion
from rose.runtime.options import EmbedOptions
from rose.runtime.queue import EmbedJob, EmbedQueue
from rose.runtime.spans import Spans
from rose.serving import protocol
from rose.serving.client_api import EngineError
from rose.serving.replicas import ReplicaSet
from tests.unit.engine_rig import CARD, NAN_ID, ToyRuntime, connected, drive, engine, raw, texts

MANY = replace(CARD, embedding=replace(CARD.embedding, outputs=("dense", "sparse", "multi_vector")))


class SpanRuntime(ToyRuntime):
    """A row is (sum of its ids, their number, kind): of a text, of a span, or of a token."""

    def compute_all(self, batch):
        self.gate.wait(10)
        return tuple(self.output(batch, output) for output in batch.outputs)

    def output(self, batch, output):
        if output != "text":
            return torch.tensor(
                [self.row(batch.ids[i : i + 1], 2.0) for i in range(len(batch.ids))]
            )
        return torch.tensor([row for single in batch.singles() for row in self.rows(single)])

    def rows(self, single):
        if single.spans is None:
            return [self.row(single.ids, 0.0)]
        return [self.row(single.ids[a:b], 1.0) for a, b in single.spans.bounds]

    def row(self, ids, kind):
        return [float("nan") if NAN_ID in ids else float(ids.sum()), float(len(ids)), kind]


@pytest.fixture
def runtime():
    runtime = SpanRuntime()
    yield runtime
    runtime.close()


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/e.sock"


def bounds(*groups):
    return [np.array(group, np.int32) for group in groups]


def test_spans_come_back_in_order_whatever_the_batches(runtime, address):
    async def scenario():
        async with engine(runtime, address), connected(address) as client:
            await client.wait_ready()
            ids = texts(*[[i, 1, 2, 3, 4, 5][: i % 5 + 2] for i in range(60)])
            spans = bounds(*[[(0, 1), (1, len(row))][: i % 2 + 1] for i, row in enumerate(ids)])
            asked = [
                client.embed(ids, EmbedOptions(), spans=spans),
                client.embed(ids, EmbedOptions()),
                client.embed(ids, EmbedOptions(normalize=True), outputs=("hidden_states",)),
                ReplicaSet([client]).embed(ids, EmbedOptions(), spans=spans),
            ]
            parts, whole, tokens, again = await asyncio.gather(*asked)
            expected = [
                [row[a:b].sum(), b - a, 1]
                for row, pairs in zip(ids, spans, strict=True)
                for a, b in pairs
            ]
            assert parts.vectors.tolist() == again.vectors.tolist() == expected
            assert whole.vectors.tolist() == [[row.sum(), len(row), 0] for row in ids]
            assert tokens.vectors.tolist() == [[i, 1, 2] for row in ids for i in row]
            assert len(runtime.batches) > 10  # of up to 32 tokens

    drive(scenario)


def test_what_is_not_finite_is_named_by_its_text(runtime, address):
    async def scenario():
        async with engine(runtime, address), connected(address) as client:
            await client.wait_ready()
            ids = texts([1, 2, 3], [4, NAN_ID, 5], [6])
            with pytest.raises(EngineError, match="NaN") as failed:
                await client.embed(ids, EmbedOptions(), outputs=("hidden_states",))
            assert failed.value.field == "input[1]"
            spans = bounds([(0, 1), (1, 2)], [(0, 1), (2, 3)], [(0, 1)])
            answer = await client.embed(ids, EmbedOptions(), spans=spans)
            assert answer.vectors[:, 0].tolist() == [1, 2, 4, 5, 6]

    drive(scenario)


@pytest.mark.parametrize(
    "frames",
    [
        ([2, 1], [1, 2, 3], [1, 1]),  # no bounds
        ([2, 1], [1, 2, 3], [1, 1], [0, 1, 0]),  # half a pair
        ([2, 1], [1, 2, 3], [1, 1], [0, 1]),  # too few
        ([2, 1], [1, 2, 3], [1, 0], [0, 1]),
        ([2, 1], [1, 2, 3], [3, -1], [0, 1, 0, 1]),
        ([2, 1], [1, 2, 3], [1], [0, 1]),
        ([2, 1], [1, 2, 3], [1, 1], [0, 3, 0, 1]),  # beyond the text
        ([2, 1], [1, 2, 3], [1, 1], [0, 1, 0, 1], [7]),
    ],
)
def test_spans_that_would_hurt_others_are_refused(runtime, address, frames):
    async def scenario():
        async with engine(runtime, address), raw(address) as client, connected(address) as other:
            await client.hello()
            await other.wait_ready()
            request = protocol.EmbedRequest(request_id=1, options=EmbedOptions())
            await client.send(request, *(np.array(frame, np.int32).tobytes() for frame in frames))
            failure = await client.receive(protocol.Failure)
            assert failure.kind == "bad_request", failure
            answer = await other.embed(texts([5]), EmbedOptions())
            assert answer.vectors.tolist() == [[5, 1, 0]]

    drive(scenario)


def test_several_outputs_come_of_one_pass_in_their_order(runtime, address):
    async def scenario():
        async with engine(runtime, address, card=MANY), connected(address) as client:
            await client.wait_ready()
            ids = texts(*[[i, 1, 2, 3, 4][: i % 4 + 2] for i in range(40)])
            outputs = ("multi_vector", "text", "token_weights")
            for asked in (client, ReplicaSet([client])):
                answer = await asked.embed(ids, EmbedOptions(), outputs=outputs)
                tokens, whole, weights = answer.vectors, *answer.more
                assert tokens.tolist() == weights.tolist() == [[i, 1, 2] for r in ids for i in r]
                assert whole.tolist() == [[row.sum(), len(row), 0] for row in ids]
            options = EmbedOptions(output_dtype="float16", dimensions=2)
            answer = await client.embed(ids, options, outputs=("text", "hidden_states"))
            assert (answer.vectors.dtype, answer.vectors.shape) == (np.float16, (40, 2))
            assert (answer.more[0].dtype, answer.more[0].shape[1]) == (np.float32, 3)
            broken = texts([1, 2], [3, NAN_ID])
            with pytest.raises(EngineError, match="NaN") as failed:
                await client.embed(broken, EmbedOptions(), outputs=("text", "multi_vector"))
            assert failed.value.field == "input[1]"

    drive(scenario)


@pytest.mark.parametrize(
    ("outputs", "spans", "field"),
    [
        ((), None, "output_types"),
        (("text", "text"), None, "output_types"),
        (("multi_vector",), None, "model"),
        (("text", "token_weights"), None, "model"),
        (("hidden_states",), [[(0, 1)]], None),
    ],
)
def test_outputs_that_there_are_not_are_refused(runtime, address, outputs, spans, field):
    async def scenario():
        async with engine(runtime, address), connected(address) as client:
            await client.wait_ready()
            given = None if spans is None else bounds(*spans)
            with pytest.raises(EngineError) as failed:
                await client.embed(texts([5]), EmbedOptions(), outputs=outputs, spans=given)
            assert (failed.value.kind, failed.value.field) == ("bad_request", field)
            assert (await client.embed(texts([5]), EmbedOptions())).vectors.tolist() == [[5, 1, 0]]

    drive(scenario)


FILL = 900
UNSEEN = replace(
    MANY,
    embedding=replace(
        MANY.embedding,
        late=LateInteraction(
            query_length=8, document_length=8, expansion=QueryExpansion(token=FILL, length=8)
        ),
    ),
)


def test_what_fills_queries_up_is_told_to_the_runtime(runtime, address):
    seen = []
    compute = runtime.output
    runtime.output = lambda batch, output: seen.append(batch.unseen) or compute(batch, output)

    async def scenario():
        async with engine(runtime, address, card=UNSEEN), connected(address) as client:
            await client.wait_ready()
            asked = {"outputs": ("multi_vector",)}
            ids = texts([1, 2, FILL], [FILL, FILL, FILL], [FILL, 3])
            await client.embed(ids, EmbedOptions(), queries=True, **asked)
            await client.embed(ids, EmbedOptions(), **asked)
            await client.embed(texts([1, 2]), EmbedOptions(), queries=True, **asked)

    drive(scenario)
    first, *others = seen
    assert first.tolist() == [1, 2, 0]  # a text keeps a token that is seen
    assert others == [None, None]


@pytest.mark.parametrize("lengths", [[2, 2], [-1, 4], [], [2**31 - 1]])
def test_lengths_are_checked_before_tokens_are_counted(runtime, address, lengths):
    async def scenario():
        async with engine(runtime, address), raw(address) as client:
            await client.hello()
            request = protocol.EmbedRequest(
                request_id=1, options=EmbedOptions(), outputs=("hidden_states",)
            )
            frames = (np.array(frame, np.int32).tobytes() for frame in (lengths, [1, 2, 3]))
            await client.send(request, *frames)
            assert (await client.receive(protocol.Failure)).kind == "bad_request"

    drive(scenario)


def test_a_batch_has_rows_of_one_kind():
    lengths = np.array([2, 3], np.int32)
    ids = np.arange(5, dtype=np.int32)
    spans = Spans(np.array([1, 1], np.int32), np.array([(0, 1), (1, 3)], np.int32))
    tokens = {"outputs": ("hidden_states",)}
    kinds = [{}, {"spans": spans}, tokens, tokens, {}]
    jobs = [EmbedJob(ids, lengths, **kind) for kind in kinds]
    queue = EmbedQueue()
    for job in jobs:
        queue.add(job)
    taken = [[piece.job for piece in queue.take(100, 100)] for _ in range(5)]
    assert taken == [[jobs[0]], [jobs[1]], jobs[2:4], [jobs[4]], []]
    assert queue.tokens == 0
