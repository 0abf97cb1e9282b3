"""Graphs of whole models: a replay equals the eager run of the same plan bit for bit."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rose.kernels.attention.base import AttentionBackend
from rose.models.embedding import EmbeddingModel
from rose.models.loader import load
from rose.runtime.cuda_graphs import CudaCapturer
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.graphs import Capturer
from rose.runtime.ragged_graphs import RaggedForward, RaggedProgram
from rose.runtime.worker import DeviceWorker
from tests.graph_rig import CallCapturer
from tools.gpu.stage import Context
from tools.gpu.subjects import backends

MIXES = ((5, 9, 40), (1, 1, 60), (20, 20, 21))  # lengths of texts that share a bucket
MODELS = ("qwen3", "minilm")


def run(context: Context) -> None:
    """Capture both models by every back end that can be captured."""
    rows = []
    for name in MODELS:
        loaded = load(
            context.folder / name, device=str(context.device), dtype="bfloat16", tasks=("embed",)
        )
        assert loaded.embedding is not None
        rows += [
            [name, backend.name, *_replays(context, loaded.embedding, backend, name)]
            for backend in backends(context, loaded.backbone.attention_specs)
        ]
    columns = [
        "model",
        "back end",
        "batches",
        "equal to the bit",
        "least cosine with eager, unpadded",
    ]
    context.report.table("Replays of one captured graph", columns, rows)


def _capturer(context: Context) -> Capturer:
    return CallCapturer() if context.dry else CudaCapturer(context.device)


def _replays(
    context: Context, model: EmbeddingModel, backend: AttentionBackend, name: str
) -> list[str]:
    forward = RaggedForward(model, backend, context.device, _no_eager, 1)
    batches = [_batch(mix, seed) for seed, mix in enumerate(MIXES)]
    keys = {forward.key(batch) for batch in batches}
    assert len(keys) == 1, "the batches were meant for one bucket"
    program = forward.program(keys.pop(), batches[0])
    capturer = _capturer(context)
    capturer.warm(program.compute)
    eager = [_run(context, program, batch, program.compute) for batch in batches]
    graph = capturer.capture(program.compute)
    replayed = [_run(context, program, batch, graph.replay) for batch in batches]
    equal = sum(map(torch.equal, eager, replayed))
    label = f"{name} by {backend.name}: replays equal to the bit"
    context.report.check(label, f"{equal} of {len(batches)}", "all", equal == len(batches))
    cosine = min(
        torch.cosine_similarity(ours, _alone(context, model, backend, batch), dim=-1).min().item()
        for ours, batch in zip(replayed, batches, strict=True)
    )
    label = f"{name} by {backend.name}: padded against unpadded"
    context.report.check(label, f"{cosine:.5f}", "cosine of at least 0.999", cosine >= 0.999)
    return [str(len(batches)), str(equal), f"{cosine:.5f}"]


def _batch(lengths: tuple[int, ...], seed: int) -> EmbedBatch:
    ids = np.random.default_rng(seed).integers(2, 290, sum(lengths), dtype=np.int32)
    return EmbedBatch(ids, np.array(lengths, np.int32), np.zeros(len(lengths), np.int32))


def _run(
    context: Context, program: RaggedProgram, batch: EmbedBatch, launch: Callable[[], None]
) -> Tensor:
    program.load(batch)
    launch()
    context.synchronize()
    return program.output(batch).clone()


def _alone(
    context: Context, model: EmbeddingModel, backend: AttentionBackend, batch: EmbedBatch
) -> Tensor:
    """The vectors of each text without padding and without neighbours."""
    worker = DeviceWorker(str(context.device))
    try:
        runtime = EmbeddingRuntime(model, backend, worker, device=context.device)
        rows = [runtime.step(one).result(120) for one in batch.singles()]
    finally:
        worker.close()
    return torch.cat(rows).to(context.device)


def _no_eager(_: EmbedBatch) -> Tensor:
    raise AssertionError("only programs are run here")
