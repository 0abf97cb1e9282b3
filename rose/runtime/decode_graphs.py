"""A language model's steps of one new token per sequence in buckets, for the graph cache.

Shape letters: B sequences of the bucket, C channels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose.kernels.attention.base import AttentionBackend, KVPages, PagedLayout
from rose.models.backbone import Backbone
from rose.models.batch import TokenBatch
from rose.runtime.decode_step import DecodeStep
from rose.runtime.fixed_inputs import FixedInputs
from rose.runtime.graphs import GraphKey, decode_key


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeForward:
    """Steps of one token per sequence; returns hidden states [sequences, C] on the device.

    Attributes:
        backbone: the model without its head.
        backend: plans attention over `pages`.
        pages: the page pool.
        max_pages: pages of the longest sequence.
        dtype: of the hidden states.
        device: where it runs.
        eager: runs a step as it is.
        carry: writes the tokens that only the device knows into the step's ids.
    """

    backbone: Backbone
    backend: AttentionBackend
    pages: KVPages
    max_pages: int
    dtype: torch.dtype
    device: torch.device
    eager: Callable[[DecodeStep], Tensor]
    carry: Callable[[DecodeStep, Tensor], None]

    def key(self, batch: DecodeStep) -> GraphKey:
        """Return the bucket of a step."""
        return decode_key(len(batch.input_ids))

    def num_tokens(self, batch: DecodeStep) -> int:
        """Return the sequences of a step."""
        return len(batch.input_ids)

    def program(self, key: GraphKey, batch: DecodeStep) -> "DecodeProgram":
        """Make the forward pass of a bucket, with `batch` loaded."""
        return DecodeProgram(self, key.sequences, batch)


class DecodeProgram:
    """The forward pass of one number of sequences.

    Rows of padding are sequences of one token in page 0, which is there for them.
    """

    def __init__(self, forward: DecodeForward, size: int, step: DecodeStep) -> None:
        """Make the inputs, load `step`, and plan the attention of every step to come."""
        self._forward = forward
        self._size = size
        self._inputs = FixedInputs(
            forward.device,
            {
                "ids": (torch.int64, (size,)),
                "positions": (torch.int64, (size,)),
                "slots": (torch.int64, (size,)),
                "cu_seqlens_q": (torch.int32, (size + 1,)),
                "block_table": (torch.int32, (size, forward.max_pages)),
            },
        )
        max_kv_len = forward.max_pages * forward.pages.page_size
        self._attention = forward.backend.fix_paged(self._upload(step), forward.pages, max_kv_len)
        self._hidden_BC = torch.zeros(
            size, forward.backbone.hidden_size, dtype=forward.dtype, device=forward.device
        )

    def load(self, batch: DecodeStep) -> None:
        """Bring a step into the inputs."""
        self._attention.update(self._upload(batch))

    def compute(self) -> None:
        """Run the backbone."""
        tokens = TokenBatch(self._inputs["ids"], self._inputs["positions"], self._attention)
        self._hidden_BC.copy_(self._forward.backbone(tokens))

    def output(self, batch: DecodeStep) -> Tensor:
        """Return the hidden states of the step's sequences, [sequences, C]."""
        return self._hidden_BC[: len(batch.input_ids)]

    def _upload(self, step: DecodeStep) -> PagedLayout:
        padding = self._size - len(step.input_ids)
        rows, columns = step.layout.block_table.shape
        block_table = np.zeros((self._size, self._forward.max_pages), np.int32)
        block_table[:rows, :columns] = step.layout.block_table.numpy()
        self._inputs.fill(
            ids=np.pad(step.input_ids.numpy(), (0, padding)),
            positions=np.pad(step.positions.numpy(), (0, padding)),
            slots=np.pad(step.layout.slot_mapping.numpy(), (0, padding)),
            cu_seqlens_q=np.arange(self._size + 1, dtype=np.int32),
            block_table=block_table,
        )
        self._forward.carry(step, self._inputs["ids"])
        return PagedLayout(
            cu_seqlens_q=self._inputs["cu_seqlens_q"],
            query_lens=(1,) * self._size,
            kv_lens=(*step.layout.kv_lens, *(1,) * padding),
            block_table=self._inputs["block_table"],
            slot_mapping=self._inputs["slots"],
        )
