"""The forward pass of a model of packed texts in buckets, for the graph cache.

Shape letters: T tokens of the bucket, S sequences of the bucket, D width of a vector.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.kernels.attention.base import AttentionBackend, RaggedLayout
from rose.models.batch import TokenBatch
from rose.runtime.fixed_inputs import FixedInputs
from rose.runtime.graphs import GraphKey, ragged_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from rose.runtime.embedding import EmbedBatch, RowModel


class RaggedForward:
    """Batches of packed texts, eagerly or in a bucket; returns float32 [texts, D] on the device."""

    def __init__(
        self,
        model: "RowModel",
        backend: AttentionBackend,
        device: torch.device,
        eager: "Callable[[EmbedBatch], Tensor]",
        min_pad: int,
        *,
        segment_ids: bool = False,
    ) -> None:
        """Serve `model` with `backend`; `eager` runs a batch as it is.

        With `segment_ids` the model is told the segment of each token.
        """
        self.model = model
        self.backend = backend
        self.device = device
        self.eager = eager
        self.segment_ids = segment_ids
        self._min_pad = min_pad

    def key(self, batch: "EmbedBatch") -> GraphKey:
        """Return the bucket of a batch."""
        longest = int(batch.lengths.max())
        return ragged_key(len(batch.lengths), len(batch.ids), longest, min_pad=self._min_pad)

    def num_tokens(self, batch: "EmbedBatch") -> int:
        """Return the tokens of a batch."""
        return len(batch.ids)

    def program(self, key: GraphKey, batch: "EmbedBatch") -> "RaggedProgram":
        """Make the forward pass of a bucket, with `batch` loaded."""
        return RaggedProgram(self, key, batch)


class RaggedProgram:
    """The forward pass of one bucket.

    Slots: the real sequences, empty ones up to the bucket's number, and the pad sequence, last.
    """

    def __init__(self, forward: RaggedForward, key: GraphKey, batch: "EmbedBatch") -> None:
        """Make the inputs, load `batch`, and plan the attention of every batch to come."""
        self._model = forward.model
        self._key = key
        slots = key.sequences + 1
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "ids": (torch.int64, (key.tokens,)),
            "positions": (torch.int64, (key.tokens,)),
            "cu_seqlens": (torch.int32, (slots + 1,)),
            "pool_from": (torch.int32, (slots,)),
        }
        self._segment_ids = forward.segment_ids
        if forward.segment_ids:
            fields["segments"] = (torch.int64, (key.tokens,))
        self._inputs = FixedInputs(forward.device, fields)
        self._attention = forward.backend.fix_ragged(self._upload(batch), key.max_seqlen)
        self._vectors_SD = torch.zeros(slots, forward.model.dimensions, device=forward.device)

    def load(self, batch: "EmbedBatch") -> None:
        """Bring a batch into the inputs."""
        self._attention.update(self._upload(batch))

    def compute(self) -> None:
        """Run the model."""
        inputs = self._inputs
        segments = inputs["segments"] if self._segment_ids else None
        tokens = TokenBatch(inputs["ids"], inputs["positions"], self._attention, segments)
        self._vectors_SD.copy_(self._model(tokens, inputs["cu_seqlens"], inputs["pool_from"]))

    def output(self, batch: "EmbedBatch") -> Tensor:
        """Return the vectors of the batch's texts, float32 [texts, D]."""
        return self._vectors_SD[: len(batch.lengths)]

    def _upload(self, batch: "EmbedBatch") -> RaggedLayout:
        lengths = self._slot_lengths(batch)
        ends = np.cumsum(lengths)
        positions = np.arange(self._key.tokens) - np.repeat(ends - lengths, lengths)
        positions[len(batch.ids) :] = 0  # a position that every model has
        pool_from = np.zeros(len(lengths), np.int32)
        pool_from[: len(batch.pool_from)] = batch.pool_from
        padding = (0, int(lengths[-1]))
        arrays = {"ids": np.pad(batch.ids.astype(np.int64), padding)}
        if self._segment_ids:
            assert batch.segments is not None
            arrays["segments"] = np.pad(batch.segments.astype(np.int64), padding)
        self._inputs.fill(
            **arrays,
            positions=positions,
            cu_seqlens=np.concatenate(([0], ends)).astype(np.int32),
            pool_from=pool_from,
        )
        return RaggedLayout(self._inputs["cu_seqlens"], tuple(lengths.tolist()))

    def _slot_lengths(self, batch: "EmbedBatch") -> npt.NDArray[np.int64]:
        """Tokens of each slot, int64 [S + 1]."""
        lengths = np.zeros(self._key.sequences + 1, np.int64)
        lengths[: len(batch.lengths)] = batch.lengths
        lengths[-1] = self._key.tokens - len(batch.ids)
        return lengths
