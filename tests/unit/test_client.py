"""The gateway's client against an engine that follows a script."""

import asyncio
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from rose.runtime.options import EmbedOptions, SamplingParams
from rose.serving import connection, protocol
from rose.serving.client_api import EngineError
from rose.serving.protocol import COUNTERS, Hello, Ping, Pong, Refused, Stats, Welcome
from rose.serving.stats import LastingStats, total
from rose.serving.transport import bind_router
from tests.unit.engine_rig import CARD, connected, drive, texts, until

IDS = np.array([1, 2], np.int32)


class Script:
    """An engine that notes what it hears and answers what it is told to."""

    def __init__(self, address):
        self.context = zmq.asyncio.Context()
        self.socket = bind_router(self.context, address)
        self.heard = []
        self.answers = {Hello: [Welcome(protocol.PROTOCOL_VERSION, CARD)]}
        self.task = asyncio.create_task(self.run())

    async def run(self):
        while True:
            self.identity, header, *_ = await self.socket.recv_multipart()
            message = protocol.decode_from_client(header)
            self.heard.append(message)
            for answer in self.answers.get(type(message), []):
                await self.send(answer)

    async def send(self, message, *frames):
        if isinstance(message, Welcome):
            frames = (b"{}",)
        header = message if isinstance(message, bytes) else protocol.encode(message)
        await self.socket.send_multipart([self.identity, header, *frames])

    def count(self, kind):
        return sum(isinstance(message, kind) for message in self.heard)

    def close(self):
        self.task.cancel()
        self.context.destroy(linger=0)


@asynccontextmanager
async def scripted(address):
    engine = Script(address)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/e.sock"


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.05)


def test_many_late_answers_cause_one_hello(address, fast, monkeypatch):
    async def scenario():
        async with scripted(address) as engine, connected(address) as client:
            await client.wait_ready()
            await until(lambda: not client.ready)  # pings stay unanswered
            assert "no sign of life" in client.unready_reason
            monkeypatch.setattr(connection, "PING_INTERVAL_S", 30)
            client._greeted -= 60  # the last hello is long ago
            hellos = engine.count(Hello)
            for sequence in range(20):
                await engine.send(Pong(sequence, Stats()))
            await until(lambda: client.ready)
            await asyncio.sleep(0.1)
            assert engine.count(Hello) == hellos + 1

    drive(scenario)


def test_a_hello_without_an_answer_is_said_again(address, fast):
    async def scenario():
        async with scripted(address) as engine:
            engine.answers = {Ping: [Pong(1, Stats())]}
            async with connected(address) as client:
                await until(lambda: engine.count(Hello) >= 3)
                assert not client.ready
                assert "not finished loading" in client.unready_reason
                engine.answers[Hello] = [Welcome(protocol.PROTOCOL_VERSION, CARD)]
                await until(lambda: client.ready)

    drive(scenario)


def test_another_version_is_said_once(address, fast, caplog):
    async def scenario():
        async with scripted(address) as engine:
            other = Refused(99, "this engine speaks another version")
            engine.answers = {Hello: [other], Ping: [Refused(99, "say hello first")]}
            async with connected(address) as client:
                await until(lambda: engine.count(Ping) > 5)
                assert "speaks version 99" in client.unready_reason
                with pytest.raises(EngineError, match="speaks version 99"):
                    await client.embed(texts([1]), EmbedOptions())

    drive(scenario)
    assert len([r for r in caplog.records if "version 99" in r.getMessage()]) == 1


def test_an_engine_that_forgot_the_client_is_greeted_again(address):
    async def scenario():
        async with scripted(address) as engine, connected(address) as client:
            await client.wait_ready()
            client._greeted -= 60
            asked = asyncio.create_task(client.embed(texts([1]), EmbedOptions()))
            await until(lambda: engine.count(protocol.EmbedRequest))
            await engine.send(Refused(protocol.PROTOCOL_VERSION, "say hello first"))
            with pytest.raises(EngineError) as caught:
                await asked
            assert caught.value.kind == "unavailable"
            await until(lambda: client.ready)

    drive(scenario)


@pytest.mark.parametrize("nonsense", [b"", b"\xff", b"\x91" * 5000])
def test_nonsense_loses_the_engine_and_not_the_client(address, nonsense):
    async def scenario():
        async with scripted(address) as engine, connected(address) as client:
            await client.wait_ready()
            await engine.send(nonsense)
            await until(lambda: not client.ready)
            assert "another protocol" in client.unready_reason
            await engine.send(Welcome(protocol.PROTOCOL_VERSION, CARD))
            await until(lambda: client.ready)

    drive(scenario)


def test_the_welcome_of_a_connection_that_broke_counts_for_nothing(address):
    async def scenario():
        async with scripted(address), connected(address) as client:
            await client.wait_ready()
            client._connected = False
            client._lose("the connection to the engine broke")
            client._welcomed(Welcome(protocol.PROTOCOL_VERSION, CARD), b"{}")
            assert not client.ready

    drive(scenario)


def test_a_pause_of_the_gateway_itself_loses_no_engine(address, fast):
    async def scenario():
        async with scripted(address) as engine, connected(address) as client:
            engine.answers[Ping] = [Pong(1, Stats())]
            await client.wait_ready()
            await until(lambda: engine.count(Ping) > 3 * connection.MAX_SILENT_PINGS)
            for _ in range(3):
                await asyncio.sleep(0.06)
                time.sleep(0.5)  # ten pings' time, in which nothing could be read
            assert client.ready
            assert engine.count(Hello) == 1

    drive(scenario)


def test_a_full_connection_loses_the_engine_and_leaves_nothing_behind(address):
    async def scenario():
        async with scripted(address), connected(address) as client:
            await client.wait_ready()

            def full(*_):
                raise zmq.Again

            send = client._port.send
            client._port.send = full
            with pytest.raises(EngineError) as caught:
                await client.embed(texts([1]), EmbedOptions())
            assert caught.value.kind == "unavailable"
            client._unready_reason = None
            with pytest.raises(EngineError):
                await anext(client.generate(IDS, SamplingParams()))
            assert (client._pending, client._streams) == ({}, {})
            client._port.send = send

    drive(scenario)


def test_a_loop_that_fails_is_heard_by_who_watches(address, monkeypatch):
    def broken(*_):
        raise KeyError("a fault of ROSE")

    async def scenario():
        async with scripted(address) as engine, connected(address) as client:
            await client.wait_ready()
            monkeypatch.setattr(client, "_handle", broken)
            await engine.send(Pong(1, Stats()))
            with pytest.raises(KeyError, match="a fault of ROSE"):
                await client.watch()

    drive(scenario)


def test_numbers_of_an_engine_that_is_gone(address):
    async def scenario():
        async with connected(address) as client:
            for tokens in (100, 7):
                async with scripted(address) as engine:
                    await until(lambda: client.ready)
                    stats = Stats(tokens=tokens, steps=2, requests_running=3, kv_pages_used=5)
                    await engine.send(Pong(1, stats))
                    await until(lambda: client.stats.requests_running == 3)
                await until(lambda: not client.ready)
                assert client.stats.requests_running == client.stats.kv_pages_used == 0
            assert (client.stats.tokens, client.stats.steps) == (107, 4)

    drive(scenario)


counts = st.integers(0, 50)


@given(st.lists(st.tuples(st.booleans(), counts, counts), max_size=20))
def test_counters_never_fall_and_lose_nothing_that_was_seen(steps):
    lasting, tokens, preemptions, seen = LastingStats(), 0, 0, 0
    for restarted, more_tokens, more_preemptions in steps:
        if restarted:
            tokens = preemptions = 0
            lasting.lost()
            tokens = min(more_tokens, 1)  # it is seen soon after its start
            assert lasting.current.tokens >= seen
        else:
            tokens, preemptions = tokens + more_tokens, preemptions + more_preemptions
        lasting.update(Stats(tokens=tokens, preemptions=preemptions))
        assert lasting.current.tokens >= seen
        seen = lasting.current.tokens


def test_counters_are_those_that_the_metrics_call_so():
    from prometheus_client.core import CounterMetricFamily

    from rose.serving.gateway.metrics import _ENGINE_NUMBERS

    counters = {name for name, (kind, _) in _ENGINE_NUMBERS.items() if kind is CounterMetricFamily}
    assert counters == set(COUNTERS)
    assert set(_ENGINE_NUMBERS) == set(Stats.__struct_fields__)


def test_the_sum_of_replicas():
    assert total([Stats(tokens=1, steps=2), Stats(tokens=3)]) == Stats(tokens=4, steps=2)
