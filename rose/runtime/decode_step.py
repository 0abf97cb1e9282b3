"""The host's side of a decode step: its tensors, as the scheduler's plan gives them.

Shape letters: T tokens of the step, B sequences, S sampled rows, N tokens that are carried over on
the device, P pages of a sequence.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.kernels.attention.base import PagedLayout
from rose.kernels.recurrence import PADDING_ROW, Mark
from rose.runtime.sampling_plan import SamplingBatch, SamplingState
from rose.runtime.sequence import PlanRow, StepPlan
from rose.runtime.state_pool import state_row


class PromptRows(NamedTuple):
    """Prompt positions of one row whose log-probabilities are wanted: few enough for one go."""

    row: int
    first: int  # index among the step's tokens
    next_ids: list[int]
    top_n: int


@dataclass(slots=True, kw_only=True)
class DecodeStep:
    """A step on the host, ready to run."""

    num_rows: int
    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    layout: PagedLayout
    state_rows: tuple[int, ...]  # of each sequence, in the state pool if there is one
    marks: tuple[tuple[Mark, ...], ...]  # states to keep, of each sequence; empty if there are none
    restored: Tensor | None  # int64 [2, N]: row of a kept state, row of the sequence that needs it
    carried: Tensor | None  # int64 [2, N]: index among the tokens, slot
    sampled: Tensor | None  # int64 [2, S]: index among the tokens, slot
    sampled_rows: list[int]
    states: list[SamplingState]
    sampling: SamplingBatch | None
    prompts: list[PromptRows]
    scrub: list[int] = field(default_factory=list)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token, as a graph needs it."""
        return len(self.input_ids) == self.num_rows


def prepare_step(
    plan: StepPlan, sampling: SamplingBatch | None, *, page_size: int, prompt_run: int
) -> DecodeStep:
    """Turn a plan into the tensors of a step, all at once.

    Args:
        plan: the scheduler's.
        sampling: of the rows that sample a token; None if none does.
        page_size: tokens of a page.
        prompt_run: prompt positions whose logits are computed in one go, at most.
    """
    rows = plan.rows
    counts = np.array([row.num_tokens for row in rows], np.int64)
    ends = np.cumsum(counts)
    starts = np.array([row.start for row in rows], np.int64)
    positions = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
    block_table = _block_table(rows)
    pages = block_table[np.repeat(np.arange(len(rows)), counts), positions // page_size]
    slot_mapping = pages.astype(np.int64) * page_size + positions % page_size
    layout = PagedLayout(
        cu_seqlens_q=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        query_lens=tuple(counts.tolist()),
        kv_lens=tuple((starts + counts).tolist()),
        block_table=torch.from_numpy(block_table),
        slot_mapping=torch.from_numpy(slot_mapping),
    )
    sampled = [(i, row) for i, row in enumerate(rows) if row.output_index is not None]
    return DecodeStep(
        num_rows=len(rows),
        input_ids=torch.from_numpy(_input_ids(rows)),
        positions=torch.from_numpy(positions),
        layout=layout,
        state_rows=tuple(state_row(row.sequence.slot) for row in rows),
        marks=tuple(map(_marks, rows)) if any(row.kept for row in rows) else (),
        restored=_restored(rows),
        carried=_places([(i, row) for i, row in enumerate(rows) if not row.is_known], ends),
        sampled=_places(sampled, ends),
        sampled_rows=[i for i, _ in sampled],
        states=[row.sequence.sampling for _, row in sampled],
        sampling=sampling,
        prompts=_prompt_rows(rows, ends, prompt_run),
        scrub=plan.scrub,
    )


def padding_step(size: int) -> DecodeStep:
    """A step of one token per sequence in which nothing is real."""
    zeros = torch.zeros(size, dtype=torch.int64)
    layout = PagedLayout(
        cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32),
        query_lens=(1,) * size,
        kv_lens=(1,) * size,
        block_table=torch.zeros(size, 1, dtype=torch.int32),
        slot_mapping=zeros,
    )
    return DecodeStep(
        num_rows=size,
        input_ids=zeros,
        positions=zeros,
        layout=layout,
        state_rows=(PADDING_ROW,) * size,
        marks=(),
        restored=None,
        carried=None,
        sampled=None,
        sampled_rows=[],
        states=[],
        sampling=None,
        prompts=[],
    )


def _marks(row: PlanRow) -> tuple[Mark, ...]:
    return tuple(Mark(position - row.start, state_row(kept)) for position, kept in row.kept)


def _restored(rows: list[PlanRow]) -> Tensor | None:
    """int64 [2, N]: rows of the state pool to copy from, and to."""
    pairs = [
        (state_row(row.snapshot), state_row(row.sequence.slot))
        for row in rows
        if row.snapshot is not None
    ]
    return torch.tensor(pairs).t() if pairs else None


def _block_table(rows: list[PlanRow]) -> npt.NDArray[np.int32]:
    """int32 [B, P]; unused entries are 0."""
    table = np.zeros((len(rows), max(len(row.sequence.pages) for row in rows)), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row.sequence.pages)] = row.sequence.pages
    return table


def _input_ids(rows: list[PlanRow]) -> npt.NDArray[np.int64]:
    """int64 [T]; 0 stands for a token that only the device knows."""
    ids: list[int] = []
    for row in rows:
        ids += row.sequence.token_ids[row.start : row.end] if row.is_known else (0,)
    return np.array(ids, np.int64)


def _places(rows: list[tuple[int, PlanRow]], ends: npt.NDArray[np.int64]) -> Tensor | None:
    """int64 [2, rows]: index of each row's last token in the step, and its sequence's slot."""
    if not rows:
        return None
    slots = [row.sequence.slot for _, row in rows]
    return torch.tensor([[int(ends[i]) - 1 for i, _ in rows], slots])


def _prompt_rows(
    rows: list[PlanRow], ends: npt.NDArray[np.int64], at_most: int
) -> list[PromptRows]:
    """What is wanted of the prompts, cut into runs of `at_most` positions."""
    prompts = []
    for index, row in enumerate(rows):
        wanted = row.prompt_rows
        for start in range(wanted.start, wanted.stop, at_most):
            stop = min(start + at_most, wanted.stop)
            ids = row.sequence.token_ids[start + 1 : stop + 1]
            first = int(ends[index]) - row.num_tokens + start - row.start
            top_n = row.sequence.params.prompt_logprobs or 0
            prompts.append(PromptRows(index, first, ids, top_n))
    return prompts
