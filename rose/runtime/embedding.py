"""The embedding runtime: packed batches through the model, without a KV cache.

A model that scores runs here too: its rows are scores and no vectors.

Shape letters: T tokens, B sequences, D width of a vector.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.kernels.attention.base import AttentionBackend, GraphSupport, KVPages, RaggedLayout
from rose.kernels.recurrence import RecurrentBatch
from rose.models.batch import TokenBatch
from rose.models.embedding import EmbeddingModel
from rose.runtime.device import upload
from rose.runtime.graphs import BatchTime, Capturer, GraphCache, GraphPolicy, WarmupShape
from rose.runtime.lazy import LazyTensor
from rose.runtime.queue import IntArray, JobSlice
from rose.runtime.ragged_graphs import RaggedForward
from rose.runtime.shared_prefix import PrefixSharing
from rose.runtime.spans import Spans, gather
from rose.runtime.worker import DeviceWorker

log = logging.getLogger(__name__)

SATURATION_TOLERANCE = 0.05
SATURATION_BUDGET_S = 1.5
SATURATION_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
DEFAULT_SATURATION = 512


@dataclass(frozen=True, slots=True)
class EmbedBatch:
    """Packed texts on the host: `ids` int32 [T], `lengths` int32 [B], `pool_from` int32 [B].

    `segments` int32 [T] are given for models that want to know which token of a pair is of which
    text. With `spans` there is a row for each of these, else one for each text.
    """

    ids: IntArray
    lengths: IntArray
    pool_from: IntArray
    segments: IntArray | None = None
    spans: Spans | None = None

    @property
    def rows(self) -> IntArray:
        """Rows of each text, int32 [B]."""
        return self.spans.counts if self.spans else np.ones_like(self.lengths)

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
            segments=_join([piece.segments for piece in slices]),
            spans=_join_spans([piece.spans for piece in slices]),
        )

    def take(self, order: npt.NDArray[np.int64]) -> "EmbedBatch":
        """Return some texts, or all, in another order."""
        places = gather(self.lengths, order)
        return EmbedBatch(
            self.ids[places],
            self.lengths[order],
            self.pool_from[order],
            None if self.segments is None else self.segments[places],
            self.spans.take(order) if self.spans else None,
        )

    @classmethod
    def of_equal(cls, count: int, length: int, vocab_size: int) -> "EmbedBatch":
        """Make up `count` texts of `length` tokens, the same whenever asked."""
        ids = np.random.default_rng(0).integers(0, vocab_size, count * length, dtype=np.int32)
        return cls(ids, np.full(count, length, np.int32), np.zeros(count, np.int32))

    def singles(self) -> "list[EmbedBatch]":
        """Return one batch per text."""
        order = np.arange(len(self.lengths))
        return [self.take(order[i : i + 1]) for i in order]

    def with_segments(self) -> "EmbedBatch":
        """Return the batch with segments; where it has none, all tokens are of the first."""
        return (
            self if self.segments is not None else replace(self, segments=np.zeros_like(self.ids))
        )


def _join(parts: list[IntArray | None]) -> IntArray | None:
    given = [part for part in parts if part is not None]
    assert len(given) in (0, len(parts)), "all jobs of a model have segments, or none has"
    return np.concatenate(given) if given else None


def _join_spans(parts: list[Spans | None]) -> Spans | None:
    given = [part for part in parts if part is not None]
    assert len(given) in (0, len(parts)), "all jobs of a batch have spans, or none has"
    return Spans.join(given) if given else None


class RowModel(Protocol):
    """A model that makes a row of `dimensions` numbers of each packed sequence."""

    @property
    def dimensions(self) -> int:
        """Numbers per sequence."""

    def __call__(
        self, batch: TokenBatch, cu_seqlens: Tensor, pool_from: Tensor | None = None
    ) -> Tensor:
        """Compute float32 [B, D]; see `rose.models.embedding.EmbeddingModel`."""
        ...


class EmbeddingRuntime:
    """Runs an embedding model. Texts in, one float32 vector per text out, lazily."""

    def __init__(
        self,
        model: RowModel,
        backend: AttentionBackend,
        worker: DeviceWorker,
        *,
        device: str | torch.device = "cpu",
        deterministic: bool = False,
        segment_ids: bool = False,
        recurrent: bool = False,
    ) -> None:
        """Serve `model` with `backend` on the device that `worker` launches for.

        With `deterministic` each text runs alone, which makes its vector bit-equal whatever else
        is in the batch, at the price of throughput on short texts. With `segment_ids` the model is
        told the segment of each token. With `recurrent` it has layers that carry a state.
        """
        self._model = model
        self._backend = backend
        self._worker = worker
        self._device = torch.device(device)
        self._deterministic = deterministic
        self._segment_ids = segment_ids
        self._recurrent = recurrent
        self._graphs: GraphCache[EmbedBatch, Tensor] | None = None
        self._prefixes: PrefixSharing | None = None

    @property
    def shares_prefixes(self) -> bool:
        """Whether what texts of a batch have in common at their start is computed once."""
        return self._prefixes is not None

    def share_prefixes(self, backend: AttentionBackend, pages: KVPages) -> None:
        """Compute common beginnings once from now on, with a back end that reads these pages.

        The model is causal, without segments and without layers that carry a state.
        """
        assert not self._deterministic
        assert not self._segment_ids
        assert not self._recurrent
        self._prefixes = PrefixSharing(self._model, backend, pages, self._device)

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
            self._model,
            self._backend,
            self._device,
            self._forward,
            policy.min_pad,
            segment_ids=self._segment_ids,
        )
        self._graphs = GraphCache(forward, capturer, policy)

    def step(self, batch: EmbedBatch) -> LazyTensor[Tensor]:
        """Launch a batch and return at once.

        The result is float32 [B, D] on the host: pooled and passed through the checkpoint's
        modules, before cutting, normalisation and quantisation. With spans it has a row for each
        of these, which for single tokens are as `EmbeddingModel.token_rows` says; such batches run
        eagerly, since a graph has a fixed number of rows.
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
        if self._segment_ids:
            batches = [batch.with_segments() for batch in batches]
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
        if self._segment_ids:
            batch = batch.with_segments()
        if self._deterministic and len(batch.lengths) > 1:
            return torch.cat([self._forward(single) for single in batch.singles()])
        if len(batch.lengths) > 1:
            order = _order(batch)
            if self._prefixes and (rows := self._prefixes.run(batch)) is not None:
                return rows[self._upload(order)]
            batch = batch.take(order)
        if self._graphs is None or batch.spans is not None:
            return self._forward(batch)
        return self._graphs.run(batch)

    def _finish(self, batch: EmbedBatch, vectors_BD: Tensor) -> Tensor:
        """Copy the rows, on the host, into the order of the texts."""
        if self._deterministic or len(batch.lengths) == 1:
            return vectors_BD.clone()
        order = _order(batch)
        return vectors_BD[torch.from_numpy(gather(batch.rows[order], np.argsort(order)))]

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
            token_type_ids=self._segments(batch),
            recurrence=RecurrentBatch(layout.lengths, self._device) if self._recurrent else None,
        )
        if batch.spans is not None:
            return self._forward_spans(tokens, batch.spans, batch.lengths)
        pool_from = self._upload(batch.pool_from) if batch.pool_from.any() else None
        return self._model(tokens, cu_seqlens, pool_from)

    def _forward_spans(self, tokens: TokenBatch, spans: Spans, lengths: IntArray) -> Tensor:
        assert isinstance(self._model, EmbeddingModel), "spans are pooled by embedders only"
        x_TC = self._model.backbone(tokens)
        if spans.output is not None:
            return self._model.token_rows(x_TC, spans.output)
        cu_seqlens, starts = spans.segments(lengths)
        x_TC = x_TC[: int(cu_seqlens[-1])]
        return self._model.pool(x_TC, self._upload(cu_seqlens), self._upload(starts))

    def _segments(self, batch: EmbedBatch) -> Tensor | None:
        if not self._segment_ids or batch.segments is None:
            return None
        return self._upload(batch.segments.astype(np.int64))

    def _upload(self, array: npt.NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(array), self._device)


def _order(batch: EmbedBatch) -> npt.NDArray[np.int64]:
    """Shortest first: equal lengths, side by side, are attended without copies."""
    return np.argsort(batch.lengths, kind="stable")
