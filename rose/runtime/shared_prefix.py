"""Texts of a batch that begin alike: their common beginning is computed once.

A ranker's prompt has the instruction and the query before the document, so the pairs of a query
share most of what is not the document. Such a beginning becomes a sequence of its own. Its keys and
values lie in pages, which the texts that begin so read too; the pages last for one forward pass.
This holds for causal models only, where no token sees what comes after it.

Shape letters: T tokens to compute, B sequences to compute, P pages of a sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.kernels.attention.base import AttentionBackend, KVPages, PagedLayout
from rose.models.batch import TokenBatch
from rose.runtime.device import upload

if TYPE_CHECKING:
    from rose.runtime.embedding import EmbedBatch, RowModel
    from rose.runtime.queue import IntArray

MIN_SHARED_TOKENS = 32
MAX_COMPUTED = 0.8  # of the batch's tokens: what saves less is not worth another way through


class Run(NamedTuple):
    """Consecutive texts `first` to `last` - 1, of which the first `shared` tokens are the same."""

    first: int
    last: int
    shared: int


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """A batch with its common beginnings as sequences of their own, on the host.

    `ids` and `positions` int64 [T]; `query_lens` and `kv_lens` int64 [B]; `block_table` int32
    [B, P]; `texts` int64: the sequence of each text.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    query_lens: npt.NDArray[np.int64]
    kv_lens: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int32]
    texts: npt.NDArray[np.int64]

    @property
    def num_pages(self) -> int:
        """Pages that it fills, the reserved page 0 included."""
        return int(self.block_table.max()) + 1

    def slots(self, page_size: int) -> npt.NDArray[np.int64]:
        """Return where the key and the value of each token go, int64 [T]."""
        sequence = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        pages = self.block_table[sequence, self.positions // page_size].astype(np.int64)
        return pages * page_size + self.positions % page_size


class PrefixSharing:
    """Runs batches whose texts begin alike through a model, with pages of its own."""

    def __init__(
        self, model: "RowModel", backend: AttentionBackend, pages: KVPages, device: torch.device
    ) -> None:
        """Serve `model`, which is causal, with a back end that can read pages."""
        self._model, self._backend, self._pages, self._device = model, backend, pages, device

    def run(self, batch: "EmbedBatch") -> Tensor | None:
        """Return the rows of a batch, in its order; None where too little is shared."""
        shared = share_prefixes(batch, self._pages.page_size)
        if shared is None or shared.num_pages > self._pages.num_pages:
            return None
        ends = np.cumsum(shared.query_lens)
        cu_seqlens = self._upload(np.concatenate(([0], ends)).astype(np.int32))
        layout = PagedLayout(
            cu_seqlens_q=cu_seqlens,
            query_lens=tuple(shared.query_lens.tolist()),
            kv_lens=tuple(shared.kv_lens.tolist()),
            block_table=self._upload(shared.block_table),
            slot_mapping=self._upload(shared.slots(self._pages.page_size)),
        )
        tokens = TokenBatch(
            input_ids=self._upload(shared.ids),
            positions=self._upload(shared.positions),
            attention=self._backend.plan_paged(layout, self._pages),
        )
        return self._model(tokens, cu_seqlens)[self._upload(shared.texts)]

    def _upload(self, array: "npt.NDArray[np.int64] | IntArray") -> Tensor:
        return upload(torch.from_numpy(array), self._device)


def share_prefixes(batch: "EmbedBatch", page_size: int) -> SharedBatch | None:
    """Find the common beginnings of a batch's texts, in whole pages.

    Returns:
        The batch in its new form, or None where that saves too little.
    """
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    starts = ends - batch.lengths
    texts = [batch.ids[start:end] for start, end in zip(starts, ends, strict=True)]
    runs = list(find_runs(texts, page_size))
    saved = sum(run.shared * (run.last - run.first - 1) for run in runs)
    if len(batch.ids) - saved > MAX_COMPUTED * len(batch.ids):
        return None
    return _Builder(page_size).build(texts, runs)


def find_runs(texts: "list[IntArray]", page_size: int) -> Iterator[Run]:
    """Group consecutive texts that share their first pages; a text alone shares nothing.

    A text that shares less than half of what a group has in common begins another one.
    """
    first = shared = 0
    for index in range(1, len(texts)):
        common = _common_pages(texts[first], texts[index], page_size)
        least = max(MIN_SHARED_TOKENS, shared // 2)
        if common >= least:
            shared = min(shared, common) if index - first > 1 else common
            continue
        yield Run(first, index, shared)
        first, shared = index, 0
    yield Run(first, len(texts), shared)


def _common_pages(one: "IntArray", other: "IntArray", page_size: int) -> int:
    """Tokens of the whole pages with which both begin; each keeps a token of its own."""
    most = min(len(one), len(other)) - 1
    differ = np.flatnonzero(one[:most] != other[:most])
    common = int(differ[0]) if len(differ) else most
    return common // page_size * page_size


class _Builder:
    """Lays out sequences and their pages."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._next_page = 1
        self._ids: list[IntArray] = []
        self._starts: list[int] = []  # position of each sequence's first token to compute
        self._pages: list[list[int]] = []

    def build(self, texts: "list[IntArray]", runs: list[Run]) -> SharedBatch:
        """Lay out all texts."""
        places = [place for run in runs for place in self._add_run(texts, run)]
        query_lens = np.array([len(ids) for ids in self._ids])
        starts = np.array(self._starts)
        ends = np.cumsum(query_lens)
        offsets = np.arange(ends[-1]) - np.repeat(ends - query_lens, query_lens)
        table = np.zeros((len(self._ids), max(map(len, self._pages))), np.int32)
        for row, pages in zip(table, self._pages, strict=True):
            row[: len(pages)] = pages
        return SharedBatch(
            ids=np.concatenate(self._ids).astype(np.int64),
            positions=offsets + np.repeat(starts, query_lens),
            query_lens=query_lens,
            kv_lens=starts + query_lens,
            block_table=table,
            texts=np.array(places),
        )

    def _add_run(self, texts: "list[IntArray]", run: Run) -> Iterator[int]:
        """Add the texts of a run, and what they share before them; yields their sequences."""
        pages: list[int] = []
        if run.shared:
            pages = self._add(texts[run.first][: run.shared], 0, [])
        for ids in texts[run.first : run.last]:
            yield len(self._ids)
            self._add(ids[run.shared :], run.shared, pages)

    def _add(self, ids: "IntArray", start: int, shared: list[int]) -> list[int]:
        count = -(-len(ids) // self._page_size)
        pages = [*shared, *range(self._next_page, self._next_page + count)]
        self._next_page += count
        self._ids.append(ids)
        self._starts.append(start)
        self._pages.append(pages)
        return pages
