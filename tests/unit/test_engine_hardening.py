"""What a bad client, a slow client or a broken device can do to an engine: nothing to the others."""

import asyncio
import itertools
import logging
import random
import time

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio

from rose.runtime.options import EmbedOptions, SamplingParams
from rose.serving import engine as engine_module
from rose.serving import engine_process, protocol, transport
from rose.serving.client_api import EngineError
from rose.serving.engine import EngineFailedError, EngineServer
from rose.serving.protocol import Cancel, EmbedRequest, Failure, Hello, Ping, Pong
from rose.serving.repeated import RepeatedWarning
from tests.unit.engine_rig import (
    LOST_ID,
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


def embed_message(request_id, *items, **options):
    lengths = np.array([len(item) for item in items], np.int32)
    ids = np.concatenate([np.array(item, np.int32) for item in items])
    request = EmbedRequest(request_id=request_id, options=EmbedOptions(**options))
    return protocol.encode(request), lengths.tobytes(), ids.tobytes()


# Messages


def test_random_bytes_and_deep_nesting_do_not_end_an_engine(runtime, address):
    rng = random.Random(0)
    valid = [
        protocol.encode(Hello(1, "x")),
        embed_message(1, [1, 2])[0],
        protocol.encode(
            protocol.GenerateRequest(request_id=2, sampling=SamplingParams(logit_bias={1: 2.0}))
        ),
    ]

    def mutated():
        header = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 4)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        return bytes(header)

    deep = b"\x82\xa4type\xa4Ping\xa1x" + b"\x91" * 20_000 + b"\xc0"

    async def scenario():
        async with engine(runtime, address), raw(address) as client:
            await client.hello()
            await client.send(deep)
            for _ in range(2000):
                frames = [rng.randbytes(rng.randrange(9)) for _ in range(rng.randrange(4))]
                await client.send(mutated(), *frames)
            async with connected(address) as other:
                await other.wait_ready()
                answer = await other.embed(texts([1, 2]), EmbedOptions())
                assert answer.vectors[0, 0] == 3

    drive(scenario)


def test_what_is_not_of_the_protocol_is_one_line_of_the_log(runtime, address, monkeypatch, caplog):
    monkeypatch.setattr(engine_module, "_unknown", RepeatedWarning(engine_module.log, "what: %s"))

    async def scenario():
        async with engine(runtime, address), raw(address) as client:
            await client.hello()
            for _ in range(50):
                await client.socket.send_multipart([b"\xc1"])
            await client.send(Ping(4))
            assert (await client.receive(Pong)).sequence == 4

    drive(scenario)
    assert len([record for record in caplog.records if "what: " in record.message]) == 1


def test_a_request_id_that_is_under_way_is_refused_and_the_first_is_answered(runtime, address):
    async def scenario():
        async with engine(runtime, address) as server, raw(address) as client:
            await client.hello()
            runtime.gate.clear()
            await client.send(*embed_message(7, [1]))
            await client.send(*embed_message(7, [2]))
            failure = await client.receive()
            assert (failure.request_id, failure.kind) == (7, "bad_request")
            runtime.gate.set()
            assert isinstance(await client.receive(), protocol.EmbedResult)
            await until(lambda: server._requests == 0)

    drive(scenario)


def test_a_flood_of_messages_leaves_others_their_turn(runtime, address):
    async def scenario():
        async with engine(runtime, address) as server, raw(address) as client:
            await client.hello()
            received = 0

            def flood():
                nonlocal received
                received += 1
                assert received < 100_000
                return [zmq.Frame(b"stranger"), zmq.Frame(protocol.encode(Ping(1)))]

            server._port._receive, server._port._is_readable = flood, lambda: True
            await client.send(Ping(1))
            await until(lambda: received)
            for _ in range(20):
                await asyncio.sleep(0)
            assert received > 20
            del server._port._receive, server._port._is_readable

    drive(scenario)


def test_a_second_hello_starts_anew(runtime, address):
    async def scenario():
        async with engine(runtime, address) as server, raw(address) as client:
            await client.hello()
            runtime.gate.clear()
            await client.send(*embed_message(1, [1]))
            await client.hello()
            assert server._requests == 0
            runtime.gate.set()
            await client.send(*embed_message(1, [2]))
            await client.receive(protocol.EmbedResult)
            assert next(iter(server._clients.values())).requests == {}

    drive(scenario)


# Clients that do not read, or leave


def test_a_client_that_does_not_read_is_dropped_with_its_work(runtime, address, monkeypatch):
    monkeypatch.setattr(transport, "QUEUE_LIMIT", 10)

    async def scenario():
        async with engine(runtime, address) as server, raw(address) as client:
            await client.hello()
            runtime.gate.clear()
            await client.send(*embed_message(1, [1]))
            await until(lambda: server._requests == 1)

            async def ask_without_reading():
                for sequence in itertools.count():
                    await client.send(Ping(sequence))
                    await asyncio.sleep(0)

            asking = asyncio.create_task(ask_without_reading())
            await until(lambda: not server._clients, timeout=30)
            asking.cancel()
            assert server._requests == 0
            async with connected(address) as other:
                await other.wait_ready()
                runtime.gate.set()
                assert (await other.embed(texts([5]), EmbedOptions())).vectors[0, 0] == 5

    drive(scenario)


def test_a_silent_client_is_dropped_with_its_work(runtime, address, monkeypatch):
    monkeypatch.setattr(engine_module, "SILENCE_CHECK_S", 0.05)

    async def scenario():
        async with engine(runtime, address) as server, raw(address) as client:
            await client.hello()
            runtime.gate.clear()
            await client.send(*embed_message(1, [1]))
            await until(lambda: server._requests == 1)
            await until(lambda: server._requests == 0)
            await client.send(Ping(1))
            assert isinstance(await client.receive(), protocol.Refused)

    drive(scenario)


def test_a_client_that_left_frees_its_work_with_the_first_answer(runtime, address):
    async def scenario():
        async with engine(runtime, address, budget=1) as server:
            async with raw(address) as client:
                await client.hello()
                runtime.gate.clear()
                for request_id in range(9):
                    await client.send(*embed_message(request_id, [1]))
                await until(lambda: server._requests == 9)
            await asyncio.sleep(0.2)  # the disconnect has no event that could be waited for
            runtime.gate.set()
            await until(lambda: server._requests == 0)
            assert not server._clients
            assert len(runtime.batches) < 9

    drive(scenario)


# Ends


def test_draining_ends_in_time_and_answers_what_it_could_not_finish(runtime, address, monkeypatch):
    monkeypatch.setattr(engine_module, "DRAIN_LIMIT_S", 0.2)

    async def scenario():
        running = RunningEngine(served_by(runtime), address)
        async with connected(address) as client:
            await client.wait_ready()
            runtime.gate.clear()
            asked = asyncio.create_task(client.embed(texts([1]), EmbedOptions()))
            await until(lambda: running.server._requests)
            running.stop.set()
            await asyncio.wait_for(running.task, 10)
            with pytest.raises(EngineError, match="has stopped"):
                await asked
        await running.close()

    drive(scenario)


def test_a_step_that_ends_after_the_engine_is_no_error(runtime, address, monkeypatch, caplog):
    monkeypatch.setattr(engine_module, "DRAIN_LIMIT_S", 0.05)

    async def scenario():
        running = RunningEngine(served_by(runtime), address)
        async with raw(address) as client:
            await client.hello()
            runtime.gate.clear()
            await client.send(*embed_message(1, [1]))
            await until(lambda: runtime.batches)
        await running.close()

    drive(scenario)
    with caplog.at_level(logging.ERROR):
        runtime.close()  # the step ends now, and the loop that waited for it is closed
    assert [record for record in caplog.records if record.name == "concurrent.futures"] == []


def test_the_last_answer_of_a_drained_engine_arrives_whole(runtime, address, monkeypatch):
    big = b"x" * (64 << 20)

    async def scenario():
        stop = asyncio.Event()
        monkeypatch.setattr(engine_process, "stop_event", lambda: stop)
        context = zmq.asyncio.Context()
        socket = transport.bind_router(context, address)
        served = served_by(runtime, tokenizer_json=big)
        task = asyncio.create_task(engine_process._serve(served, socket))
        async with raw(address) as client:
            await client.send(Hello(protocol.PROTOCOL_VERSION, "raw"))
            await client.send(*embed_message(1, [1]))
            await until(lambda: runtime.batches)
            stop.set()
            await task
            context.destroy(linger=0)
            _, frame = await client.socket.recv_multipart()
            assert len(frame) == len(big)

    drive(scenario)


def test_an_engine_that_stops_loses_no_answer_that_it_gave(runtime, address, monkeypatch):
    servers = []

    class NotedServer(EngineServer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            servers.append(self)

    monkeypatch.setattr(engine_process, "EngineServer", NotedServer)

    async def scenario():
        async with connected(address) as client:
            for _ in range(10):
                stop = asyncio.Event()
                monkeypatch.setattr(engine_process, "stop_event", lambda stop=stop: stop)
                context = zmq.asyncio.Context()
                socket = transport.bind_router(context, address)
                task = asyncio.create_task(engine_process._serve(served_by(runtime), socket))
                await until(lambda: client.ready)
                runtime.gate.clear()
                asked = [
                    asyncio.create_task(client.embed(texts([i]), EmbedOptions())) for i in range(50)
                ]
                await until(lambda: servers[-1]._requests == 50)
                stop.set()
                runtime.gate.set()
                await task
                context.destroy(linger=0)
                answers = await asyncio.gather(*asked)
                assert [answer.vectors[0, 0] for answer in answers] == list(range(50))
                await until(lambda: not client.ready)

    drive(scenario)


def test_a_lost_device_ends_the_engine_with_the_reason(runtime, address):
    async def scenario():
        running = RunningEngine(served_by(runtime), address)
        async with connected(address) as client:
            await client.wait_ready()
            asked = asyncio.create_task(client.embed(texts([LOST_ID]), EmbedOptions()))
            with pytest.raises(EngineFailedError, match="illegal memory access"):
                await running.task
            running.socket.close()
            with pytest.raises(EngineError) as caught:
                await asked
            assert caught.value.kind == "unavailable"
        await running.close()

    drive(scenario)


def test_a_device_that_hangs_ends_the_engine_and_a_slow_one_does_not(runtime, address, monkeypatch):
    monkeypatch.setattr(engine_module, "STEP_CHECK_S", 0.05)
    monkeypatch.setattr(engine_module, "STEP_LIMIT_S", 0.6)

    async def scenario():
        running = RunningEngine(served_by(runtime, budget=1), address)
        async with connected(address) as client:
            await client.wait_ready()
            await asyncio.sleep(0.8)  # idle is no fault
            monkeypatch.setattr(runtime, "compute", slowly(runtime.compute, 0.2))
            answer = await client.embed(texts(*[[1]] * 8), EmbedOptions())
            assert len(answer.vectors) == 8
            runtime.gate.clear()
            asked = asyncio.create_task(client.embed(texts([1]), EmbedOptions()))
            with pytest.raises(EngineFailedError, match="has not ended"):
                await running.task
            running.socket.close()
            with pytest.raises(EngineError):
                await asked
        await running.close()

    drive(scenario)


def slowly(compute, seconds):
    def run(batch):
        time.sleep(seconds)
        return compute(batch)

    return run


def test_a_loop_that_fails_ends_the_engine_also_while_it_drains(runtime, address):
    async def scenario():
        running = RunningEngine(served_by(runtime), address)
        async with raw(address) as client:
            await client.hello()
            runtime.gate.clear()
            await client.send(*embed_message(1, [1]))
            await until(lambda: running.server._requests)
            running.stop.set()
            await until(lambda: running.server._draining)

            def broken():
                raise KeyError("a fault of ROSE")

            running.server._stats = broken
            await client.send(Ping(1))
            with pytest.raises(EngineFailedError, match="a fault of ROSE"):
                await running.task
        await running.close()

    drive(scenario)


def test_failures_are_logged_with_the_id_of_the_http_request(runtime, address, caplog):
    async def scenario():
        async with engine(runtime, address), connected(address) as client:
            await client.wait_ready()
            with pytest.raises(EngineError):
                await client.embed(texts([997]), EmbedOptions(), trace="req-5")

    drive(scenario)
    (record,) = [record for record in caplog.records if "req-5" in record.message]
    assert record.request_id == "req-5"
    assert record.levelname == "ERROR"


def test_a_cancel_of_nothing_is_no_error(runtime, address):
    async def scenario():
        async with engine(runtime, address), raw(address) as client:
            await client.hello()
            await client.send(Cancel(99))
            await client.send(Ping(3))
            assert (await client.receive(Pong)).sequence == 3

    drive(scenario)


def test_only_lasting_errors_of_the_device_are_fatal():
    from rose.runtime.faults import is_lasting

    assert is_lasting(torch.AcceleratorError("CUDA error: an illegal memory access"))
    assert not is_lasting(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_lasting(RuntimeError("shapes do not fit"))


def test_an_unknown_failure_has_no_field():
    assert engine_module._failure(1, KeyError("x")) == Failure(
        request_id=1, kind="internal", message="'x'"
    )
