"""Generation over a real socket: a toy model behind the engine, the gateway's client before it."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest
import torch

from rose.runtime.build import Generation
from rose.runtime.errors import RequestError
from rose.runtime.options import SamplingParams
from rose.runtime.worker import DeviceWorker
from rose.serving import generate_service, protocol
from rose.serving.client_api import EngineError
from rose.serving.engine import EngineFailedError
from tests.generation_rig import Rig
from tests.unit.engine_rig import RunningEngine, connected, drive, raw, served_by, until
from tests.unit.test_generation import VOCAB, ToyModel

PROMPT = np.arange(1, 9, dtype=np.int32)
GREEDY = SamplingParams(temperature=0, max_tokens=6)


class Grammars:
    """A compiler whose only schema is broken; it takes its time."""

    def matcher(self, schema):
        text = schema.encode().decode("unicode_escape")
        raise RequestError(f"{text} is no schema", "response_format")


@pytest.fixture
def generation():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    worker = DeviceWorker()
    torch.manual_seed(0)
    rig = Rig(ToyModel(), worker)
    yield Generation(rig.runtime, rig.scheduler, Grammars())
    worker.close()
    torch.set_num_threads(threads)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/e.sock"


@asynccontextmanager
async def engine(generation, address):
    running = RunningEngine(served_by(None, generation=generation), address)
    try:
        yield running.server
        await until(lambda: generation.scheduler.pool.used == 0)
        generation.scheduler.check()
    finally:
        await running.close()
    running.task.result()


async def collect(client, ids=PROMPT, sampling=GREEDY):
    async with aclosing(client.generate(ids, sampling)) as deltas:
        return [token async for delta in deltas for token in delta.token_ids]


def test_tokens_come_step_by_step_and_end(generation, address):
    async def scenario():
        async with engine(generation, address) as server, connected(address) as client:
            await client.wait_ready()
            async with aclosing(client.generate(PROMPT, GREEDY)) as deltas:
                found = [delta async for delta in deltas]
            assert len(found) == 6
            assert [delta.finish for delta in found] == [None] * 5 + ["length"]
            assert await collect(client) == [delta.token_ids[0] for delta in found]
            assert server._requests == 0
            assert next(iter(server._clients.values())).requests == {}

    drive(scenario)


@pytest.mark.parametrize(
    ("ids", "options", "field"),
    [
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([], {}, "prompt"),
        ([1] * 400, {}, "prompt"),
        ([1], {"max_tokens": -1}, "max_tokens"),
        ([1], {"min_tokens": -1}, "min_tokens"),
        ([1], {"logprobs": -1}, "logprobs"),
        ([1], {"logprobs": 10**9}, "logprobs"),
        ([1], {"prompt_logprobs": -2}, "prompt_logprobs"),
        ([1], {"grammar": "{{"}, "response_format"),
        ([1], {"grammar": r"\ud800"}, "response_format"),
    ],
)
def test_the_engine_refuses_what_would_hurt_it(generation, address, ids, options, field):
    async def scenario():
        async with engine(generation, address) as server, connected(address) as client:
            await client.wait_ready()
            sampling = SamplingParams(**{"max_tokens": 4, **options})
            with pytest.raises(EngineError) as caught:
                await collect(client, np.array(ids, np.int32), sampling)
            assert (caught.value.kind, caught.value.field) == ("bad_request", field)
            assert server._requests == 0
            assert len(await collect(client)) == 6

    drive(scenario)


def test_odd_numbers_hurt_nobody_else(generation, address):
    nan, big = float("nan"), 10**18
    odd = [
        {"temperature": nan},
        {"temperature": float("inf")},
        {"temperature": -1},
        {"top_p": nan},
        {"top_p": -1},
        {"min_p": nan},
        {"min_p": 7},
        {"top_k": big},
        {"top_k": -5},
        {"repetition_penalty": 0},
        {"repetition_penalty": nan},
        {"presence_penalty": 1e300},
        {"logit_bias": {-5: 1.0, big: 2.0, 3: nan, 4: float("inf")}},
        {"stop_token_ids": (-1, big)},
        {"seed": big},
        {"seed": -1},
        {"min_tokens": big},
        {"max_tokens": big},
        {"max_tokens": 0},
    ]

    async def scenario():
        async with engine(generation, address) as server, connected(address) as client:
            await client.wait_ready()
            alone = await collect(client)
            tasks = [
                asyncio.create_task(
                    collect(client, sampling=SamplingParams(**{"max_tokens": 4, **options}))
                )
                for options in odd
            ]
            assert await collect(client) == alone
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await collect(client) == alone
            assert server._requests == 0

    drive(scenario)


@pytest.mark.parametrize("leave", ["close", "cancel", "before the first", "disconnect"])
def test_leaving_frees_the_engine(generation, address, leave):
    long = SamplingParams(temperature=0, max_tokens=110)

    async def scenario():
        async with engine(generation, address) as server:
            async with connected(address) as client:
                await client.wait_ready()
                deltas = client.generate(PROMPT, long)
                if leave == "before the first":
                    await deltas.aclose()
                elif leave == "cancel":
                    task = asyncio.create_task(collect(client, sampling=long))
                    await until(lambda: server._requests)
                    task.cancel()
                else:
                    await anext(deltas)
                    assert server._requests == 1
                if leave == "close":
                    await deltas.aclose()
                if leave != "disconnect":
                    await until(lambda: server._requests == 0)
                    assert client._streams == {}
            await until(lambda: server._requests == 0)
            await until(lambda: server._stats().sequences_running == 0)

    drive(scenario)


def test_a_request_id_that_is_under_way_is_refused_and_the_first_can_be_cancelled(
    generation, address
):
    async def scenario():
        async with engine(generation, address) as server, raw(address) as client:
            await client.hello()
            request = protocol.GenerateRequest(
                request_id=5, sampling=SamplingParams(max_tokens=110)
            )
            await client.send(request, PROMPT.tobytes())
            await client.send(request, PROMPT.tobytes())
            assert (await client.receive(protocol.Failure)).kind == "bad_request"
            await client.send(protocol.Cancel(5))
            await until(lambda: server._requests == 0)
            await until(lambda: server._stats().sequences_running == 0)

    drive(scenario)


def test_too_many_requests_are_refused(generation, address, monkeypatch):
    monkeypatch.setattr(generate_service, "MAX_REQUESTS", 2)

    async def scenario():
        async with engine(generation, address), connected(address) as client:
            await client.wait_ready()
            outcomes = await asyncio.gather(
                *[collect(client) for _ in range(5)], return_exceptions=True
            )
            kinds = [o.kind for o in outcomes if isinstance(o, EngineError)]
            assert kinds == ["overloaded"] * 3
            assert len(await collect(client)) == 6

    drive(scenario)


def test_waiting_sequences_count_as_queued(generation, address):
    async def scenario():
        async with engine(generation, address) as server, connected(address) as client:
            await client.wait_ready()
            long = SamplingParams(max_tokens=100, ignore_eos=True)
            tasks = [asyncio.create_task(collect(client, sampling=long)) for _ in range(20)]
            await until(lambda: server._stats().requests_running == 16)
            assert server._stats().requests_queued == 4
            for task in tasks:
                task.cancel()
            await until(lambda: server._requests == 0)
            stats = server._stats()
            assert (stats.requests_running, stats.requests_queued) == (0, 0)

    drive(scenario)


def test_a_lost_device_ends_the_engine(generation, address, monkeypatch):
    def lost(_):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    async def scenario():
        running = RunningEngine(served_by(None, generation=generation), address)
        async with connected(address) as client:
            await client.wait_ready()
            monkeypatch.setattr(generation.runtime, "_launch", lost)
            with pytest.raises(EngineError, match="launch failure"):
                await collect(client)
            with pytest.raises(EngineFailedError, match="launch failure"):
                await running.task
        await running.close()

    drive(scenario)


def test_a_failed_step_fails_its_requests_and_the_next_ones_work(generation, address, monkeypatch):
    def broken(_):
        raise RuntimeError("a step that fails")

    async def scenario():
        async with engine(generation, address) as server, connected(address) as client:
            await client.wait_ready()
            with monkeypatch.context() as patch:
                patch.setattr(generation.runtime, "_launch", broken)
                with pytest.raises(EngineError, match="a step that fails") as caught:
                    await collect(client)
            assert caught.value.kind == "internal"
            assert len(await collect(client)) == 6
            assert server._requests == 0

    drive(scenario)
