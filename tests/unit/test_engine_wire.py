"""Engine and client over a real socket, with a runtime that the test controls."""

import asyncio
import time

import numpy as np
import pytest

from rose.runtime.options import EmbedOptions
from rose.serving import connection, protocol
from rose.serving.client_api import EngineError
from tests.unit.engine_rig import (
    CARD,
    CRASH_ID,
    NAN_ID,
    RunningEngine,
    ToyRuntime,
    connected,
    drive,
    engine,
    raw,
    served_by,
    texts,
    until,
)


@pytest.fixture
def runtime():
    runtime = ToyRuntime()
    yield runtime
    runtime.close()


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/e.sock"


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
        async with (
            engine(runtime, address, budget=10) as server,
            connected(address) as client,
        ):
            await client.wait_ready()
            runtime.gate.clear()
            waiting = [
                asyncio.create_task(client.embed(texts([i] * 4), EmbedOptions())) for i in range(6)
            ]
            await until(lambda: server._requests == 6)
            runtime.gate.set()
            answers = await asyncio.gather(*waiting)
            assert [a.vectors[0, 0] for a in answers] == [4 * i for i in range(6)]
            assert [4, 4] in runtime.batches
            assert all(sum(lengths) <= 10 for lengths in runtime.batches)

    drive(scenario)


def test_a_failed_step_and_a_nan_hurt_their_own_requests_alone(runtime, address):
    async def scenario():
        async with engine(runtime, address) as server, connected(address) as client:
            await client.wait_ready()
            runtime.gate.clear()
            first = asyncio.create_task(client.embed(texts([0]), EmbedOptions()))
            await until(lambda: runtime.batches)
            asked = [
                client.embed(texts([1, 1, 1, 1]), EmbedOptions()),
                client.embed(texts([CRASH_ID, 1], [1]), EmbedOptions()),
                client.embed(texts([2, 2], [NAN_ID, 2]), EmbedOptions()),
                client.embed(texts([3, 3, 3, 3]), EmbedOptions()),
            ]
            tasks = [asyncio.create_task(each) for each in asked]
            await until(lambda: server._requests == 5)
            runtime.gate.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await first
            assert [4, 2, 1, 2, 2, 4] in runtime.batches, "they were neighbours"
            assert outcomes[0].vectors[0, 0] == 4
            assert outcomes[1].kind == "internal"
            assert "out of memory" in outcomes[1].message
            assert (outcomes[2].kind, outcomes[2].field) == ("non_finite", "input[1]")
            assert outcomes[3].vectors[0, 0] == 12
            assert server._requests == 0

    drive(scenario)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[1000]], {}, "0 to 999"),
        ([[-1]], {}, "0 to 999"),
        ([[1] * 65], {}, "limit is 64"),
        ([[1], []], {}, "at least 1"),
        ([[1, 2]], {"pool_from": 2}, "no token to pool"),
        ([[1, 2]], {"options": EmbedOptions(dimensions=4)}, "from 1 to 3"),
        ([[1, 2]], {"options": EmbedOptions(dimensions=0)}, "from 1 to 3"),
    ],
)
def test_the_engine_refuses_what_would_hurt_it(runtime, address, ids, options, message):
    async def scenario():
        async with engine(runtime, address), connected(address) as client:
            await client.wait_ready()
            with pytest.raises(EngineError, match=message) as caught:
                await client.embed(texts(*ids), **{"options": EmbedOptions(), **options})
            assert caught.value.kind == "bad_request"
            assert (await client.embed(texts([1]), EmbedOptions())).vectors[0, 0] == 1

    drive(scenario)


def test_a_full_queue_is_refused_at_once(runtime, address):
    async def scenario():
        async with (
            engine(runtime, address, budget=4, max_queue_tokens=8) as server,
            connected(address) as client,
        ):
            await client.wait_ready()
            runtime.gate.clear()
            # Two run, two wait: the first is launched before the others arrive.
            tasks = [asyncio.create_task(client.embed(texts([1] * 4), EmbedOptions()))]
            await until(lambda: runtime.batches)
            tasks += [
                asyncio.create_task(client.embed(texts([1] * 4), EmbedOptions())) for _ in range(6)
            ]
            await until(lambda: sum(task.done() for task in tasks) >= 3)
            done = [task for task in tasks if task.done()]
            assert {task.exception().kind for task in done} == {"overloaded"}
            assert server._requests == 7 - len(done)
            runtime.gate.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(not isinstance(o, EngineError) for o in outcomes) == 7 - len(done)

    drive(scenario)


def test_cancelling_the_wait_frees_the_engine(runtime, address):
    async def scenario():
        async with engine(runtime, address, budget=4) as server, connected(address) as client:
            await client.wait_ready()
            runtime.gate.clear()
            tasks = [
                asyncio.create_task(client.embed(texts([1] * 4), EmbedOptions())) for _ in range(8)
            ]
            await until(lambda: len(runtime.batches) == 2 and server._requests == 8)
            stats = server._stats()
            assert (stats.requests_running, stats.requests_queued) == (2, 6)
            assert stats.tokens_queued == 24
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: server._requests == 0)
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
            await until(lambda: server._requests == 0)

    drive(scenario)


def test_a_dead_engine_fails_its_requests_at_once_and_a_new_one_is_found(runtime, address):
    async def scenario():
        async with connected(address) as client:
            running = RunningEngine(served_by(runtime), address)
            await client.wait_ready()
            runtime.gate.clear()
            waiting = asyncio.create_task(client.embed(texts([1]), EmbedOptions()))
            await until(lambda: running.server._requests)
            running.task.cancel()
            running.socket.close()
            began = time.monotonic()
            with pytest.raises(EngineError) as caught:
                await waiting
            assert caught.value.kind == "unavailable"
            assert time.monotonic() - began < 3
            assert not client.ready
            with pytest.raises(EngineError, match="not ready"):
                await client.embed(texts([1]), EmbedOptions())
            await running.close()
            runtime.gate.set()
            async with engine(runtime, address):
                await until(lambda: client.ready)
                assert (await client.embed(texts([9]), EmbedOptions())).vectors[0, 0] == 9

    drive(scenario)


def test_a_silent_engine_is_given_up_and_taken_back(runtime, address, monkeypatch):
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.05)

    async def scenario():
        async with engine(runtime, address) as server, connected(address) as client:
            await client.wait_ready()
            dispatch = server._dispatch
            held = []
            server._dispatch = lambda *message: held.append(message)
            await until(lambda: not client.ready)
            assert "no sign of life" in client.unready_reason
            server._dispatch = dispatch
            for message in held:
                dispatch(*message)
            await until(lambda: client.ready)
            assert (await client.embed(texts([4]), EmbedOptions())).vectors[0, 0] == 4

    drive(scenario)


def test_draining_finishes_what_was_admitted_and_refuses_more(runtime, address):
    async def scenario():
        running = RunningEngine(served_by(runtime), address)
        async with connected(address) as client:
            await client.wait_ready()
            runtime.gate.clear()
            admitted = asyncio.create_task(client.embed(texts([1]), EmbedOptions()))
            await until(lambda: running.server._requests)
            running.stop.set()
            await until(lambda: running.server._draining)
            with pytest.raises(EngineError, match="shutting down"):
                await client.embed(texts([1]), EmbedOptions())
            runtime.gate.set()
            assert (await admitted).vectors[0, 0] == 1
            await running.task
        await running.close()

    drive(scenario)


def test_an_engine_that_is_stopped_takes_leave(runtime, address, caplog):
    async def scenario():
        running = RunningEngine(served_by(runtime), address)
        async with connected(address) as client:
            await client.wait_ready()
            running.stop.set()
            await running.task
            await until(lambda: not client.ready)
            assert client.unready_reason == "the engine has stopped"
            await running.close()
            await until(lambda: not client._connected)

    drive(scenario)
    assert not [r for r in caplog.records if r.levelname == "WARNING" and "engine" in r.message]


def test_strangers_and_other_versions_are_told_so(runtime, address):
    async def scenario():
        async with engine(runtime, address):
            async with raw(address) as client:
                await client.send(protocol.Hello(99, "x"))
                answer = await client.receive()
                assert isinstance(answer, protocol.Refused)
                assert f"version {protocol.PROTOCOL_VERSION}" in answer.reason
                await client.send(protocol.Ping(1))
                assert isinstance(await client.receive(), protocol.Refused)
            async with raw(address) as client:
                await client.send(b"\xff garbage")
                await client.send(b"", b"")
                await client.hello()

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
