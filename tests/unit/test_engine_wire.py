"""Engine and client over a real socket, with a runtime that the test controls."""

import asyncio
import math
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio

from rose.models.card import EmbeddingCard, ModelCard, TokenizerCard
from rose.runtime.options import EmbedOptions
from rose.runtime.worker import DeviceWorker
from rose.serving import client as client_module
from rose.serving import protocol
from rose.serving.client import EngineClient
from rose.serving.client_api import EngineError
from rose.serving.engine import EngineServer
from rose.serving.transport import AddressError, bind_router, check_address, make_dealer

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
    embedding=EmbeddingCard(dimensions=3, normalize=False, pooling="mean"),
)

NAN_ID, CRASH_ID = 998, 999


class ToyRuntime:
    """A text's vector is (sum of its ids, its length, 1). Two ids misbehave."""

    def __init__(self):
        self.worker = DeviceWorker()
        self.gate = threading.Event()
        self.gate.set()
        self.batches = []

    def step(self, batch):
        self.batches.append(batch.lengths.tolist())
        return self.worker.submit(lambda: self.compute(batch))

    def compute(self, batch):
        self.gate.wait(10)
        if CRASH_ID in batch.ids:
            raise RuntimeError("out of memory")
        rows = []
        for single in batch.singles():
            total = math.nan if NAN_ID in single.ids else float(single.ids.sum())
            rows.append([total, float(len(single.ids)), 1.0])
        return torch.tensor(rows)


@pytest.fixture
def runtime():
    runtime = ToyRuntime()
    yield runtime
    runtime.gate.set()
    runtime.worker.close()


@asynccontextmanager
async def engine(runtime, address, *, budget=32, max_queue_tokens=1 << 20):
    loaded = SimpleNamespace(tokenizer_json=b"{}")
    served = SimpleNamespace(
        loaded=loaded, card=CARD, generation=None, embedding=runtime, max_batch_tokens=budget
    )
    context = zmq.asyncio.Context()
    stop = asyncio.Event()
    with bind_router(context, address) as socket:
        server = EngineServer(socket, served, max_queue_tokens=max_queue_tokens)
        task = asyncio.create_task(server.run(stop))
        try:
            yield server
        finally:
            stop.set()
            runtime.gate.set()
            await task
            context.destroy(linger=0)


@asynccontextmanager
async def connected(address):
    context = zmq.asyncio.Context()
    client = EngineClient(context, address)
    client.start()
    try:
        yield client
    finally:
        await client.close()
        context.destroy(linger=0)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/e.sock"


def texts(*items):
    return [np.array(item, np.int32) for item in items]


def drive(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_handshake_and_an_answer(runtime, address):
    async def scenario():
        async with connected(address) as client:
            assert not client.ready
            assert client.card is None
            async with engine(runtime, address):
                await client.wait_ready()
                assert client.ready
                assert client.card == CARD
                assert client.tokenizer_json == b"{}"
                answer = await client.embed(texts([1, 2], [5]), EmbedOptions())
                assert answer.vectors.tolist() == [[3, 2, 1], [5, 1, 1]]
                assert answer.queued_s >= 0
                assert answer.computed_s > 0

    drive(scenario)


@pytest.mark.parametrize(
    ("dtype", "row"),
    [("float32", [2, 1, 1]), ("float16", [2, 1, 1]), ("int8", [127, 64, 64]), ("ubinary", [224])],
)
def test_every_output_dtype_crosses_the_wire(runtime, address, dtype, row):
    async def scenario():
        async with engine(runtime, address), connected(address) as client:
            await client.wait_ready()
            answer = await client.embed(texts([2]), EmbedOptions(output_dtype=dtype))
            assert answer.vectors.tolist() == [row]

    drive(scenario)


def test_a_large_request_takes_several_steps_and_comes_back_in_order(runtime, address):
    async def scenario():
        async with engine(runtime, address), connected(address) as client:
            await client.wait_ready()
            answer = await client.embed(
                texts(*[[i] * (i % 7 + 1) for i in range(200)]), EmbedOptions()
            )
            assert answer.vectors[:, 1].tolist() == [i % 7 + 1 for i in range(200)]
            assert answer.vectors[:, 0].tolist() == [i * (i % 7 + 1) for i in range(200)]
            assert all(sum(lengths) <= 32 for lengths in runtime.batches)

    drive(scenario)


def test_requests_that_wait_are_batched_up_to_the_budget(runtime, address):
    async def scenario():
        async with engine(runtime, address, budget=10), connected(address) as client:
            await client.wait_ready()
            runtime.gate.clear()
            waiting = [
                asyncio.create_task(client.embed(texts([i] * 4), EmbedOptions())) for i in range(6)
            ]
            await asyncio.sleep(0.2)
            runtime.gate.set()
            answers = await asyncio.gather(*waiting)
            assert [a.vectors[0, 0] for a in answers] == [4 * i for i in range(6)]
            assert [4, 4] in runtime.batches
            assert all(sum(lengths) <= 10 for lengths in runtime.batches)

    drive(scenario)


def test_a_failed_step_and_a_nan_hurt_their_own_requests_alone(runtime, address):
    async def scenario():
        async with engine(runtime, address, budget=4), connected(address) as client:
            await client.wait_ready()
            outcomes = await asyncio.gather(
                client.embed(texts([1, 1, 1, 1]), EmbedOptions()),
                client.embed(texts([CRASH_ID, 1, 1, 1]), EmbedOptions()),
                client.embed(texts([2, 2], [NAN_ID, 2]), EmbedOptions()),
                client.embed(texts([3, 3, 3, 3]), EmbedOptions()),
                return_exceptions=True,
            )
            assert outcomes[0].vectors[0, 0] == 4
            assert outcomes[1].kind == "internal"
            assert "out of memory" in outcomes[1].message
            assert (outcomes[2].kind, outcomes[2].field) == ("non_finite", "input[1]")
            assert outcomes[3].vectors[0, 0] == 12

    drive(scenario)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[1000]], {}, "0 to 999"),
        ([[-1]], {}, "0 to 999"),
        ([[1] * 65], {}, "limit is 64"),
        ([[1], []], {}, "at least 1"),
        ([[1, 2]], {"pool_from": 2}, "no token to pool"),
    ],
)
def test_the_engine_refuses_what_would_hurt_it(runtime, address, ids, options, message):
    async def scenario():
        async with engine(runtime, address), connected(address) as client:
            await client.wait_ready()
            with pytest.raises(EngineError, match=message) as caught:
                await client.embed(texts(*ids), EmbedOptions(), **options)
            assert caught.value.kind == "bad_request"
            assert (await client.embed(texts([1]), EmbedOptions())).vectors[0, 0] == 1

    drive(scenario)


def test_a_full_queue_is_refused_at_once(runtime, address):
    async def scenario():
        async with (
            engine(runtime, address, budget=4, max_queue_tokens=8),
            connected(address) as client,
        ):
            await client.wait_ready()
            runtime.gate.clear()
            tasks = [
                asyncio.create_task(client.embed(texts([1] * 4), EmbedOptions())) for _ in range(6)
            ]
            done, _ = await asyncio.wait(tasks, timeout=0.5)
            assert {task.exception().kind for task in done} == {"overloaded"}
            runtime.gate.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(not isinstance(o, EngineError) for o in outcomes) == 6 - len(done) >= 2

    drive(scenario)


def test_cancelling_the_wait_frees_the_engine(runtime, address):
    async def scenario():
        async with engine(runtime, address, budget=4) as server, connected(address) as client:
            await client.wait_ready()
            runtime.gate.clear()
            tasks = [
                asyncio.create_task(client.embed(texts([1] * 4), EmbedOptions())) for _ in range(8)
            ]
            await asyncio.sleep(0.2)
            assert server._stats().requests_running == 8
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.2)
            stats = server._stats()
            assert (stats.requests_running, stats.requests_queued, stats.tokens_queued) == (0, 0, 0)
            runtime.gate.set()
            assert (await client.embed(texts([7]), EmbedOptions())).vectors[0, 0] == 7
            assert len(runtime.batches) <= 3, "nothing that was cancelled in the queue ran"

    drive(scenario)


def test_a_deadline_is_an_error_and_cancels(runtime, address):
    async def scenario():
        async with engine(runtime, address) as server, connected(address) as client:
            await client.wait_ready()
            runtime.gate.clear()
            with pytest.raises(EngineError) as caught:
                await client.embed(texts([1]), EmbedOptions(), timeout_s=0.1)
            assert caught.value.kind == "deadline"
            await asyncio.sleep(0.1)
            assert server._stats().requests_running == 0

    drive(scenario)


def test_a_dead_engine_fails_its_requests_at_once_and_a_new_one_is_found(runtime, address):
    async def scenario():
        async with connected(address) as client:
            context = zmq.asyncio.Context()
            socket = bind_router(context, address)
            loaded = SimpleNamespace(tokenizer_json=b"{}")
            served = SimpleNamespace(
                loaded=loaded, card=CARD, generation=None, embedding=runtime, max_batch_tokens=8
            )
            task = asyncio.create_task(EngineServer(socket, served).run(asyncio.Event()))
            await client.wait_ready()
            runtime.gate.clear()
            waiting = asyncio.create_task(client.embed(texts([1]), EmbedOptions()))
            await asyncio.sleep(0.1)
            task.cancel()
            socket.close()
            began = time.monotonic()
            with pytest.raises(EngineError) as caught:
                await waiting
            assert caught.value.kind == "unavailable"
            assert time.monotonic() - began < 1
            assert not client.ready
            with pytest.raises(EngineError, match="not ready"):
                await client.embed(texts([1]), EmbedOptions())
            context.destroy(linger=0)
            runtime.gate.set()
            async with engine(runtime, address):
                while not client.ready:
                    await asyncio.sleep(0.02)
                assert (await client.embed(texts([9]), EmbedOptions())).vectors[0, 0] == 9

    drive(scenario)


def test_a_silent_engine_is_given_up_and_taken_back(runtime, address, monkeypatch):
    monkeypatch.setattr(client_module, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(client_module, "SILENCE_LIMIT_S", 0.3)

    async def scenario():
        async with engine(runtime, address) as server, connected(address) as client:
            await client.wait_ready()
            frozen = asyncio.Event()
            receive = server._socket.recv_multipart

            async def stuck():
                await frozen.wait()
                return await receive()

            server._socket.recv_multipart = stuck
            while client.ready:
                await asyncio.sleep(0.02)
            assert "no sign of life" in client.unready_reason
            frozen.set()
            while not client.ready:
                await asyncio.sleep(0.02)
            assert (await client.embed(texts([4]), EmbedOptions())).vectors[0, 0] == 4

    drive(scenario)


def test_draining_finishes_what_was_admitted_and_refuses_more(runtime, address):
    async def scenario():
        context = zmq.asyncio.Context()
        loaded = SimpleNamespace(tokenizer_json=b"{}")
        served = SimpleNamespace(
            loaded=loaded, card=CARD, generation=None, embedding=runtime, max_batch_tokens=8
        )
        stop = asyncio.Event()
        with bind_router(context, address) as socket:
            task = asyncio.create_task(EngineServer(socket, served).run(stop))
            async with connected(address) as client:
                await client.wait_ready()
                runtime.gate.clear()
                admitted = asyncio.create_task(client.embed(texts([1]), EmbedOptions()))
                await asyncio.sleep(0.1)
                stop.set()
                await asyncio.sleep(0.05)
                with pytest.raises(EngineError, match="shutting down"):
                    await client.embed(texts([1]), EmbedOptions())
                runtime.gate.set()
                assert (await admitted).vectors[0, 0] == 1
                await task
        context.destroy(linger=0)

    drive(scenario)


async def raw_exchange(address, *frames):
    context = zmq.asyncio.Context()
    socket = make_dealer(context)
    socket.connect(address)
    try:
        for message in frames:
            await socket.send_multipart(message)
        header, *_ = await socket.recv_multipart()
        return protocol.decode_from_engine(header)
    finally:
        context.destroy(linger=0)


def test_strangers_and_other_versions_are_told_so(runtime, address):
    async def scenario():
        async with engine(runtime, address):
            hello = protocol.encode(protocol.Hello(99, "x"))
            answer = await raw_exchange(address, [hello])
            assert isinstance(answer, protocol.Refused)
            assert "version 1" in answer.reason
            answer = await raw_exchange(address, [protocol.encode(protocol.Ping(1))])
            assert isinstance(answer, protocol.Refused)
            hello = protocol.encode(protocol.Hello(protocol.PROTOCOL_VERSION, "x"))
            answer = await raw_exchange(address, [b"\xff garbage"], [b"", b""], [hello])
            assert isinstance(answer, protocol.Welcome)

    drive(scenario)


def test_malformed_frames_are_a_bad_request(runtime, address):
    async def scenario():
        async with engine(runtime, address), connected(address) as client:
            await client.wait_ready()
            request = protocol.EmbedRequest(request_id=77, options=EmbedOptions())
            for frames in ([], [b"abc", b"abcd"], [np.array([-5, 9], np.int32).data, b"\0" * 16]):
                with pytest.raises(EngineError) as caught:
                    await client._ask(request, frames)
                assert caught.value.kind == "bad_request"

    drive(scenario)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "http://x",
        "ipc://",
        "tcp://127.0.0.1",
        "tcp://0.0.0.0:5555",
        "tcp://10.1.2.3:1",
        "tcp://127.0.0.1:99999",
        "ipc://" + "x" * 200,
    ],
)
def test_addresses_that_must_not_be_used(address):
    with pytest.raises(AddressError, match="address"):
        check_address(address)


def test_an_address_in_use_is_a_clear_error(tmp_path):
    context = zmq.asyncio.Context()
    with bind_router(context, "tcp://127.0.0.1:*") as socket:
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        with pytest.raises(AddressError, match="cannot listen on"):
            bind_router(context, bound)
    context.destroy(linger=0)
