"""An engine process whose model answers at once: `python -m tools.stand_in_engine MODEL ADDRESS`.

All of it is ROSE's own but the forward pass, so what is left is the cost of serving.
"""

import asyncio
import sys
from dataclasses import replace

import torch
import zmq.asyncio

from rose.runtime.build import ModelOptions, build
from rose.runtime.embedding import EmbedBatch
from rose.runtime.lazy import LazyTensor
from rose.runtime.worker import DeviceWorker
from rose.serving.engine import EngineServer
from rose.serving.process import set_up_logging, stop_event
from rose.serving.transport import bind_router


class InstantRuntime:
    """Gives every text the same vector."""

    graphs = None

    def __init__(self, dimensions: int, worker: DeviceWorker) -> None:
        """Answer with vectors of so many numbers."""
        generator = torch.Generator().manual_seed(0)
        self._vector_D = torch.randn(dimensions, generator=generator)
        self._worker = worker

    def step_all(self, batch: EmbedBatch) -> LazyTensor[tuple[torch.Tensor, ...]]:
        """Answer a batch."""
        rows_BD = self._vector_D.expand(len(batch.lengths), -1)
        return self._worker.submit(lambda: (rows_BD,))


def main(model: str, address: str) -> None:
    """Serve until a signal comes."""
    set_up_logging("warning", "stand-in")
    served = build(ModelOptions(path=model, max_batch_tokens=1 << 16, max_model_len=512))
    assert served.card.embedding is not None
    instant = InstantRuntime(served.card.embedding.dimensions, served.worker)
    served = replace(served, embedding=instant)  # type: ignore[arg-type]

    async def run() -> None:
        context = zmq.asyncio.Context()
        await EngineServer(bind_router(context, address), served).run(stop_event())
        context.destroy(linger=0)

    asyncio.run(run())
    served.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
