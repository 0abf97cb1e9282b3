"""The embedding runtime: packed batches through the model, without a KV cache.

Shape letters: T tokens, B sequences, D width of a vector.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.kernels.attention.base import AttentionBackend, GraphSupport, RaggedLayout
from rose.kernels.recurrence import RecurrentBatch
from rose.models.batch import TokenBatch
from rose.models.embedding import EmbeddingModel
from rose.runtime.device import upload
from rose.runtime.graphs import BatchTime, Capturer, GraphCache, GraphPolicy, WarmupShape
from rose.runtime.lazy import LazyTensor
from rose.runtime.queue import IntArray, JobSlice
from rose.runtime.ragged_graphs import RaggedForward
from rose.runtime.worker import DeviceWorker

log = logging.getLogger(__name__)

SATURATION_TOLERANCE = 0.05
SATURATION_BUDGET_S = 1.5
SATURATION_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
DEFAULT_SATURATION = 512


@dataclass(frozen=True, slots=True)
class EmbedBatch:
    """Packed texts on the host: `ids` int32 [T], `lengths` int32 [B], `pool_from` int32 [B]."""

    ids: IntArray
    lengths: IntArray
    pool_from: IntArray

    @classmethod
    def of_slices(cls, slices: Sequence[JobSlice]) -> "EmbedBatch":
        """Pack slices of jobs, in their order."""
        return cls(
            ids=np.concatenate([piece.ids for piece in slices]),
            lengths=np.concatenate([piece.lengths for piece in slices]),
            pool_from=np.concatenate(
                [
                    np.full(piece.last - piece.first, piece.job.pool_from, np.int32)
                    for piece in slices
                ]
            ),
        )

    def take(self, order: npt.NDArray[np.int64]) -> "EmbedBatch":
        """Return the texts in another order."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        starts, lengths = (ends - self.lengths)[order], self.lengths[order]
        new_starts = np.cumsum(lengths, dtype=np.int64) - lengths
        places = np.arange(len(self.ids)) + np.repeat(starts - new_starts, lengths)
        return EmbedBatch(self.ids[places], lengths, self.pool_from[order])

    @classmethod
    def of_equal(cls, count: int, length: int, vocab_size: int) -> "EmbedBatch":
        """Make up `count` texts of `length` tokens, the same whenever asked."""
        ids = np.random.default_rng(0).integers(0, vocab_size, count * length, dtype=np.int32)
        return cls(ids, np.full(count, length, np.int32), np.zeros(count, np.int32))

    def singles(self) -> "list[EmbedBatch]":
        """Return one batch per text."""
        starts = np.concatenate(([0], np.cumsum(self.lengths)))
        return [
            EmbedBatch(self.ids[starts[i] : starts[i + 1]], self.lengths[i : i + 1], pool_from)
            for i, pool_from in enumerate(np.split(self.pool_from, len(self.lengths)))
        ]


class EmbeddingRuntime:
    """Runs an embedding model. Texts in, one float32 vector per text out, lazily."""

    def __init__(
        self,
        model: EmbeddingModel,
        backend: AttentionBackend,
        worker: DeviceWorker,
        *,
        device: str | torch.device = "cpu",
        deterministic: bool = False,
        recurrent: bool = False,
    ) -> None:
        """Serve `model` with `backend` on the device that `worker` launches for.

        With `deterministic` each text runs alone, which makes its vector bit-equal whatever else
        is in the batch, at the price of throughput on short texts. With `recurrent` it has layers
        that carry a state.
        """
        self._model = model
        self._backend = backend
        self._worker = worker
        self._device = torch.device(device)
        self._deterministic = deterministic
        self._recurrent = recurrent
        self._graphs: GraphCache[EmbedBatch, Tensor] | None = None

    @property
    def graphs(self) -> GraphCache[EmbedBatch, Tensor] | None:
        """The graph cache, None where all batches run eagerly."""
        return self._graphs

    @property
    def can_use_graphs(self) -> bool:
        """Whether batches can be captured.

        A graph and an eager run differ in the last bits, so a deterministic runtime has none.
        Layers that carry a state work through as many chunks as the texts have.
        """
        if self._recurrent:
            return False
        return not self._deterministic and self._backend.graph_support is GraphSupport.ALL

    def use_graphs(self, capturer: Capturer, policy: GraphPolicy) -> None:
        """Run batches as device graphs from now on, within the limits of `policy`."""
        assert self.can_use_graphs
        forward = RaggedForward(
            self._model, self._backend, self._device, self._forward, policy.min_pad
        )
        self._graphs = GraphCache(forward, capturer, policy)

    def step(self, batch: EmbedBatch) -> LazyTensor[Tensor]:
        """Launch a batch and return at once.

        The result is float32 [B, D] on the host: pooled and passed through the checkpoint's
        modules, before cutting, normalisation and quantisation.
        """
        return self._worker.launch(
            lambda: [self._run(batch)], lambda outputs: self._finish(batch, outputs[0])
        )

    def warm_up(self, shapes: Sequence[WarmupShape], vocab_size: int) -> None:
        """Run made-up batches of these shapes, until their graphs are captured if there are any."""
        batches = [
            EmbedBatch.of_equal(shape.sequences, shape.tokens, vocab_size)
            for shape in shapes
            if shape.tokens is not None
        ]
        if self._graphs is not None:
            graphs = self._graphs
            self._worker.submit(lambda: graphs.warmup(batches)).result()
            return
        for batch in batches:
            self.step(batch).result()

    def time_batch(self, tokens: int, max_len: int, vocab_size: int) -> BatchTime:
        """Run a batch eagerly and alone, and say how long its launches and its work take."""
        device = self._worker.device
        length = min(tokens, max_len)
        batch = EmbedBatch.of_equal(max(1, tokens // length), length, vocab_size)

        def run() -> BatchTime:
            began = time.perf_counter()
            self._forward(batch)
            launched = time.perf_counter() - began
            if device is not None:
                device.event().wait()
            return BatchTime(launched, time.perf_counter() - began)

        return self._worker.submit(run).result()

    def measure_saturation(self, max_len: int, vocab_size: int) -> int:
        """Find the batch size, in tokens, from which larger batches hardly gain throughput.

        It is the smallest size within 5 % of the best tokens per second, of the doublings that the
        time budget allows; where that is over before 512 tokens, 512.
        """
        rates: dict[int, float] = {}
        began = time.perf_counter()
        for tokens in SATURATION_SIZES:
            rates[tokens] = tokens / self._time_batch(tokens, max_len, vocab_size)
            elapsed = time.perf_counter() - began
            if elapsed + 4 * tokens / rates[tokens] > SATURATION_BUDGET_S:
                break
        best = max(rates.values())
        chosen = min(n for n, rate in rates.items() if rate >= (1 - SATURATION_TOLERANCE) * best)
        if max(rates) < DEFAULT_SATURATION:
            chosen = DEFAULT_SATURATION
        log.info("saturation point: %d tokens a batch (best %.0f tokens/s)", chosen, best)
        return chosen

    def _time_batch(self, tokens: int, max_len: int, vocab_size: int) -> float:
        """Return the seconds of the faster of two runs of a batch of equal texts."""
        length = min(128, max_len)
        count = max(1, tokens // length)
        batch = EmbedBatch.of_equal(count, length, vocab_size)
        times = []
        for _ in range(2):
            began = time.perf_counter()
            self.step(batch).result()
            times.append(time.perf_counter() - began)
        return min(times) * tokens / (count * length)

    def _run(self, batch: EmbedBatch) -> Tensor:
        """Launch a batch; its rows are in the order of `_order`."""
        if self._deterministic and len(batch.lengths) > 1:
            return torch.cat([self._forward(single) for single in batch.singles()])
        if len(batch.lengths) > 1:
            batch = batch.take(_order(batch))
        return self._forward(batch) if self._graphs is None else self._graphs.run(batch)

    def _finish(self, batch: EmbedBatch, vectors_BD: Tensor) -> Tensor:
        """Copy the rows, on the host, into the order of the texts."""
        if self._deterministic or len(batch.lengths) == 1:
            return vectors_BD.clone()
        return vectors_BD[torch.from_numpy(np.argsort(_order(batch)))]

    def _forward(self, batch: EmbedBatch) -> Tensor:
        ends = np.cumsum(batch.lengths, dtype=np.int64)
        starts = ends - batch.lengths
        positions = np.arange(len(batch.ids)) - np.repeat(starts, batch.lengths)
        cu_seqlens = self._upload(np.concatenate(([0], ends)).astype(np.int32))
        layout = RaggedLayout(cu_seqlens, tuple(batch.lengths.tolist()))
        tokens = TokenBatch(
            input_ids=self._upload(batch.ids.astype(np.int64)),
            positions=self._upload(positions),
            attention=self._backend.plan_ragged(layout),
            recurrence=RecurrentBatch(layout.lengths, self._device) if self._recurrent else None,
        )
        pool_from = self._upload(batch.pool_from) if batch.pool_from.any() else None
        return self._model(tokens, cu_seqlens, pool_from)

    def _upload(self, array: npt.NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(array), self._device)


def _order(batch: EmbedBatch) -> npt.NDArray[np.int64]:
    """Shortest first: equal lengths, side by side, are attended without copies."""
    return np.argsort(batch.lengths, kind="stable")
