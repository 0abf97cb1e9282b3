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

from rose.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    GraphSupport,
    KVPages,
    RaggedLayout,
)
from rose.kernels.attention.expanded import ExpandedBatch
from rose.kernels.recurrence import RecurrentBatch
from rose.models.batch import TokenBatch
from rose.models.card import RowOutput
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
SATURATION_BUDGET_S = 0.5
SATURATION_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
LEAST_SATURATION = 512


@dataclass(frozen=True, slots=True)
class EmbedBatch:
    """Packed texts on the host: `ids` int32 [T], `lengths` int32 [B], `pool_from` int32 [B].

    `segments` int32 [T] are given for models that want to know which token of a pair is of which
    text. `outputs` are what is computed; for "text" there is a row for each of the `spans`, where
    there are some, else one for each text. `unseen` int32 [B] are trailing tokens that the others
    of their text do not see.
    """

    ids: IntArray
    lengths: IntArray
    pool_from: IntArray
    segments: IntArray | None = None
    spans: Spans | None = None
    outputs: tuple[RowOutput, ...] = ("text",)
    unseen: IntArray | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is a row for each text, and its tokens all see each other."""
        return self.spans is None and self.outputs == ("text",) and self.unseen is None

    def rows(self, output: RowOutput) -> IntArray:
        """Return the rows of each text in an output, int32 [B]."""
        if output != "text":
            return self.lengths
        return self.spans.counts if self.spans else np.ones_like(self.lengths)

    @classmethod
    def of_slices(cls, slices: Sequence[JobSlice]) -> "EmbedBatch":
        """Pack slices of jobs, in their order."""
        if len(slices) == 1:
            return cls.of_slice(slices[0])
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
            outputs=slices[0].job.outputs,
            unseen=_join([piece.unseen for piece in slices]),
        )

    @classmethod
    def of_slice(cls, piece: JobSlice) -> "EmbedBatch":
        """Make a batch of one slice, whose texts are packed already."""
        return cls(
            ids=piece.ids,
            lengths=piece.lengths,
            pool_from=np.full(piece.last - piece.first, piece.job.pool_from, np.int32),
            segments=piece.segments,
            spans=piece.spans,
            outputs=piece.job.outputs,
            unseen=piece.unseen,
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
            self.outputs,
            None if self.unseen is None else self.unseen[order],
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
    assert len(given) in (0, len(parts)), "all jobs of a batch have them, or none has"
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

        The result is the one output of the batch, float32 on the host. For "text" it is [B, D]:
        pooled and passed through the checkpoint's modules, before cutting, normalisation and
        quantisation; with spans it has a row for each of these. Others have a row for each token,
        as `EmbeddingModel.token_rows` says. What is not plain runs eagerly, since a graph has a
        fixed number of rows.
        """
        assert len(batch.outputs) == 1
        return self._worker.launch(
            lambda: self._run(batch), lambda outputs: self._finish(batch, outputs)[0]
        )

    def step_all(self, batch: EmbedBatch) -> LazyTensor[tuple[Tensor, ...]]:
        """Launch a batch like `step`, for any number of outputs of one pass, in their order."""
        return self._worker.launch(
            lambda: self._run(batch), lambda outputs: self._finish(batch, outputs)
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
        time budget allows, but not below 512 tokens: what a batch costs beside its tokens is more
        than the measurement can tell apart there.
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
        chosen = max(chosen, LEAST_SATURATION)
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

    def _run(self, batch: EmbedBatch) -> list[Tensor]:
        """Launch a batch; the rows of its outputs are in the order of `_order`."""
        if self._segment_ids:
            batch = batch.with_segments()
        if self._deterministic and len(batch.lengths) > 1:
            parts = [self._compute(single) for single in batch.singles()]
            return [torch.cat(rows) for rows in zip(*parts, strict=True)]
        if len(batch.lengths) > 1:
            order = _order(batch)
            if self._prefixes and (rows := self._prefixes.run(batch)) is not None:
                return [rows[self._upload(order)]]
            batch = batch.take(order)
        if self._graphs is None or not batch.is_plain:
            return self._compute(batch)
        return [self._graphs.run(batch)]

    def _finish(self, batch: EmbedBatch, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy the rows of each output, on the host, into the order of the texts."""
        if self._deterministic or len(batch.lengths) == 1:
            return tuple(rows.clone() for rows in outputs)
        order = _order(batch)
        back = np.argsort(order)
        places = [gather(batch.rows(output)[order], back) for output in batch.outputs]
        pairs = zip(outputs, places, strict=True)
        return tuple(rows[torch.from_numpy(place)] for rows, place in pairs)

    def _forward(self, batch: EmbedBatch) -> Tensor:
        return self._compute(batch)[0]

    def _compute(self, batch: EmbedBatch) -> list[Tensor]:
        """Compute the outputs of a batch, in its order."""
        ends = np.cumsum(batch.lengths, dtype=np.int64)
        starts = ends - batch.lengths
        positions = np.arange(len(batch.ids)) - np.repeat(starts, batch.lengths)
        cu_seqlens = self._upload(np.concatenate(([0], ends)).astype(np.int32))
        layout = RaggedLayout(cu_seqlens, tuple(batch.lengths.tolist()))
        tokens = TokenBatch(
            input_ids=self._upload(batch.ids.astype(np.int64)),
            positions=self._upload(positions),
            attention=self._plan(batch, layout),
            token_type_ids=self._segments(batch),
            recurrence=RecurrentBatch(layout.lengths, self._device) if self._recurrent else None,
        )
        pool_from = self._upload(batch.pool_from) if batch.pool_from.any() else None
        if batch.spans is None and batch.outputs == ("text",):
            return [self._model(tokens, cu_seqlens, pool_from)]
        assert isinstance(self._model, EmbeddingModel), "embedders alone have other outputs"
        model, x_TC = self._model, self._model.backbone(tokens)
        return [
            model.token_rows(x_TC, output)
            if output != "text"
            else self._pool(model, x_TC, cu_seqlens, pool_from, batch)
            for output in batch.outputs
        ]

    def _plan(self, batch: EmbedBatch, layout: RaggedLayout) -> AttentionBatch:
        if batch.unseen is None:
            return self._backend.plan_ragged(layout)
        return ExpandedBatch(layout.lengths, batch.unseen.tolist(), self._device)

    def _pool(
        self,
        model: EmbeddingModel,
        x_TC: Tensor,
        cu_seqlens: Tensor,
        pool_from: Tensor | None,
        batch: EmbedBatch,
    ) -> Tensor:
        """Return a row for each text, or for each of its spans."""
        if batch.spans is None:
            return model.pool(x_TC, cu_seqlens, pool_from)
        ends, starts = batch.spans.segments(batch.lengths)
        x_TC = x_TC[: int(ends[-1])]
        return model.pool(x_TC, self._upload(ends), self._upload(starts))

    def _segments(self, batch: EmbedBatch) -> Tensor | None:
        if not self._segment_ids or batch.segments is None:
            return None
        return self._upload(batch.segments.astype(np.int64))

    def _upload(self, array: npt.NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(array), self._device)


def _order(batch: EmbedBatch) -> npt.NDArray[np.int64]:
    """Shortest first: equal lengths, side by side, are attended without copies."""
    return np.argsort(batch.lengths, kind="stable")
