"""An engine and clients over a real socket, with a runtime that the test controls."""

import asyncio
import math
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import torch
import zmq
import zmq.asyncio

from rose.models.card import EmbeddingCard, ModelCard, TokenizerCard
from rose.runtime.worker import DeviceWorker
from rose.serving import protocol
from rose.serving.client import EngineClient
from rose.serving.engine import EngineServer
from rose.serving.transport import bind_router, make_dealer

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
    embedding=EmbeddingCard(dimensions=3, hidden_size=3, normalize=False, pooling="mean"),
)

NAN_ID, CRASH_ID, LOST_ID = 997, 998, 999


class ToyRuntime:
    """A text's vector is (sum of its ids, its length, 1). Three ids misbehave."""

    def __init__(self):
        self.worker = DeviceWorker()
        self.gate = threading.Event()
        self.gate.set()
        self.batches = []

    def step_all(self, batch):
        self.batches.append(batch.lengths.tolist())
        return self.worker.submit(lambda: self.compute_all(batch))

    def compute_all(self, batch):
        return (self.compute(batch),)

    def compute(self, batch):
        self.gate.wait(10)
        if CRASH_ID in batch.ids:
            raise RuntimeError("out of memory")
        if LOST_ID in batch.ids:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        rows = []
        for single in batch.singles():
            total = math.nan if NAN_ID in single.ids else float(single.ids.sum())
            rows.append([total, float(len(single.ids)), 1.0])
        return torch.tensor(rows)

    def close(self):
        self.gate.set()
        self.worker.close()


def served_by(
    runtime, budget=32, *, generation=None, scoring=None, tokenizer_json=b"{}", card=CARD
):
    return SimpleNamespace(
        loaded=SimpleNamespace(tokenizer_json=tokenizer_json),
        card=card,
        generation=generation,
        embedding=runtime,
        scoring=scoring,
        max_batch_tokens=budget,
        max_score_tokens=budget,
        graphs={},
    )


class RunningEngine:
    """An engine on its socket; `task` is done when it has ended."""

    def __init__(self, served, address, **options):
        self.context = zmq.asyncio.Context()
        self.socket = bind_router(self.context, address)
        self.server = EngineServer(self.socket, served, **options)
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.server.run(self.stop))

    async def close(self):
        self.stop.set()
        await asyncio.gather(self.task, return_exceptions=True)
        self.context.destroy(linger=0)


@asynccontextmanager
async def engine(runtime, address, *, budget=32, tokenizer_json=b"{}", card=CARD, **options):
    served = served_by(runtime, budget, tokenizer_json=tokenizer_json, card=card)
    running = RunningEngine(served, address, **options)
    try:
        yield running.server
    finally:
        runtime.gate.set()
        await running.close()
        running.task.result()


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


class RawClient:
    """A client without manners: it sends what it is told, and reads when it is told."""

    def __init__(self, address):
        self.context = zmq.asyncio.Context()
        self.socket = make_dealer(self.context, address)
        self.socket.connect(address)

    async def send(self, message, *frames):
        header = message if isinstance(message, bytes) else protocol.encode(message)
        await self.socket.send_multipart([header, *frames])

    async def receive(self, kind=None):
        """The next message, or the next of a kind."""
        while True:
            header, *_ = await self.socket.recv_multipart()
            message = protocol.decode_from_engine(header)
            if kind is None or isinstance(message, kind):
                return message

    async def hello(self):
        await self.send(protocol.Hello(protocol.PROTOCOL_VERSION, "raw"))
        assert isinstance(await self.receive(), protocol.Welcome)

    def close(self):
        self.context.destroy(linger=0)


@asynccontextmanager
async def raw(address):
    client = RawClient(address)
    try:
        yield client
    finally:
        client.close()


def texts(*items):
    return [np.array(item, np.int32) for item in items]


async def until(condition, timeout=10.0):
    """Wait for a condition to hold."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


def drive(scenario, timeout=60):
    asyncio.run(asyncio.wait_for(scenario(), timeout))
