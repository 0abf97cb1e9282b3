"""Chooses the next token of each row from the model's logits, on the logits' own device.

The host plans a step (`Sampler.plan`) from what it knows without the tokens on their way: the
parameters of each sequence and the index of the token to come. The device then samples
(`Sampler.sample`) without waiting for the host. What depends on the tokens themselves, the counts
behind the penalties, stays on the device.

A row's token depends on its own logits, parameters, seed and index, never on its neighbours: its
random number is a hash of (seed, index), and `rose.kernels.sampling` draws each row by itself.

Log-probabilities are those of the model's own logits, before every step of `SamplingParams`.

Shape letters: B rows of the batch, S rows drawn at random, P rows with penalties, K rows of the
table of counts, G rows with a grammar, L rows with log-probabilities, T tokens, V vocabulary, N
most likely tokens, W words of 32 bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.kernels.sampling import BLOCK, Knobs, draw
from rose.runtime.sampling_plan import (
    Bias,
    CountSlots,
    Grammar,
    Logprobs,
    Penalties,
    RandomRows,
    Refill,
    RowStatus,
    SampledRow,
    SamplingBatch,
    SamplingState,
    Words,
    plan_bans,
    plan_bias,
    plan_grammar,
    plan_logprobs,
    plan_random,
    unpack,
)

__all__ = [
    "RowStatus",
    "SampledRow",
    "SampledTokens",
    "Sampler",
    "SamplingBatch",
    "SamplingState",
    "token_logprobs",
    "unpack",
]

IN_PROMPT = 1 << 30  # flag of a token of the prompt in the table of counts


@dataclass(slots=True)
class SampledTokens:
    """One step's outcome, on the device.

    Attributes:
        token_ids: int64 [B]; a valid id even for a row that failed.
        packed: float64 [B, 2], or [B, 3 + 2 N] with log-probabilities: token, status, chosen
            log-probability, N ids, N log-probabilities. One tensor to copy, for `unpack`.
    """

    token_ids: Tensor
    packed: Tensor


class Sampler:
    """Plans and samples for one model. Plans are to be sampled in the order of their making.

    Args:
        vocab_size: V, the width of the logits.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        """Start with no sequence known."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._slots = CountSlots()
        self._counts_KV = torch.zeros(0, vocab_size, dtype=torch.int32, device=self.device)

    def plan(
        self,
        states: Sequence[SamplingState],
        indices: Sequence[int],
        masks: Mapping[int, Words] | None = None,
    ) -> SamplingBatch:
        """Plan a step. Host work only; needs no token of a step still on its way.

        Args:
            states: the sequences, in the order of the rows of the logits.
            indices: for each, the number of its output tokens before this one.
            masks: grammar masks by row, int32 [W] each; every row with a grammar has one.
        """
        return SamplingBatch(
            size=len(states),
            random=plan_random(states, indices, self.vocab_size),
            penalties=self._slots.plan(states, indices),
            bias=plan_bias(states, self.vocab_size),
            bans=plan_bans(states, indices, self.vocab_size),
            grammar=plan_grammar(masks or {}),
            logprobs=plan_logprobs(states),
        )

    def release(self, state: SamplingState) -> None:
        """Forget a sequence; steps already planned may still hold it."""
        self._slots.release(state)

    @torch.inference_mode()
    def sample(self, logits_BV: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Choose a token for each row. On a GPU it launches work and waits for none.

        Args:
            logits_BV: [B, V], any float dtype, as the model gave them; left as they are.
            batch: the plan of this step.
        """
        assert logits_BV.shape == (batch.size, self.vocab_size)
        raw_BV = logits_BV.float().contiguous()
        final_BV = self._process(raw_BV, batch)
        best_B, token_ids_B = final_BV.max(-1)
        status_B = _status(best_B, None if final_BV is raw_BV else raw_BV)
        for group in batch.random:
            self._draw(final_BV, token_ids_B, group)
        if batch.penalties is not None:
            self._count(token_ids_B, batch.penalties)
        packed = self._pack(raw_BV, token_ids_B, status_B, batch.logprobs)
        return SampledTokens(token_ids_B, packed)

    def _put(self, array: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _process(self, raw_BV: Tensor, batch: SamplingBatch) -> Tensor:
        """Penalties, biases, bans and grammars; the logits themselves when there are none."""
        steps = (batch.penalties, batch.bias, batch.bans, batch.grammar)
        if all(step is None for step in steps):
            return raw_BV
        out_BV = raw_BV.clone()
        if batch.penalties is not None:
            self._penalise(out_BV, batch.penalties)
        if batch.bias is not None:
            self._add_bias(out_BV, batch.bias)
        if batch.bans is not None:
            out_BV.view(-1).index_fill_(0, self._put(batch.bans), -torch.inf)
        if batch.grammar is not None:
            self._mask(out_BV, batch.grammar)
        return out_BV

    def _penalise(self, out_BV: Tensor, plan: Penalties) -> None:
        for refill in plan.refills:
            self._refill(refill)
        rows_P, slots_P = self._put(plan.rows), self._put(plan.slots)
        values_3P1 = self._put(plan.values)[:, :, None]
        size = len(rows_P) if out_BV.is_cuda else max(1, BLOCK // self.vocab_size)
        for at in (slice(start, start + size) for start in range(0, len(rows_P), size)):
            x_PV = out_BV.index_select(0, rows_P[at])
            counts_PV = self._counts_KV.index_select(0, slots_P[at])
            x_PV = _penalised(x_PV, counts_PV, values_3P1[:, at], plan)
            out_BV.index_copy_(0, rows_P[at], x_PV)

    def _refill(self, refill: Refill) -> None:
        missing = refill.slot + 1 - len(self._counts_KV)
        if missing > 0:
            zeros = self._counts_KV.new_zeros(max(missing, len(self._counts_KV)), self.vocab_size)
            self._counts_KV = torch.cat([self._counts_KV, zeros])
        row_V = self._counts_KV[refill.slot].zero_()
        row_V.index_fill_(0, self._put(refill.prompt_ids), IN_PROMPT)
        output_T = self._put(refill.output_ids)
        row_V.index_add_(0, output_T, torch.ones_like(output_T, dtype=torch.int32))

    def _count(self, token_ids_B: Tensor, plan: Penalties) -> None:
        tokens_P = token_ids_B.index_select(0, self._put(plan.rows))
        flat_P = self._put(plan.slots) * self.vocab_size + tokens_P
        ones_P = torch.ones_like(flat_P, dtype=torch.int32)
        self._counts_KV.view(-1).index_add_(0, flat_P, ones_P)

    def _add_bias(self, out_BV: Tensor, plan: Bias) -> None:
        out_BV.view(-1).index_add_(0, self._put(plan.places), self._put(plan.values))

    def _mask(self, out_BV: Tensor, plan: Grammar) -> None:
        rows_G = self._put(plan.rows)
        allowed_GV = unpack_bits(self._put(plan.masks), self.vocab_size)
        masked_GV = out_BV.index_select(0, rows_G).masked_fill_(~allowed_GV, -torch.inf)
        out_BV.index_copy_(0, rows_G, masked_GV)

    def _draw(self, logits_BV: Tensor, token_ids_B: Tensor, plan: RandomRows) -> None:
        """Replace the ids of rows that are drawn at random."""
        rows_S = self._put(plan.rows)
        if len(plan.rows) < len(logits_BV):
            logits_BV = logits_BV.index_select(0, rows_S)
        knobs = Knobs(*self._put(plan.knobs)[:, :, None])
        token_ids_B.index_copy_(0, rows_S, draw(logits_BV, knobs, plan.cut))

    def _pack(
        self, raw_BV: Tensor, token_ids_B: Tensor, status_B: Tensor, plan: Logprobs | None
    ) -> Tensor:
        head_B2 = torch.stack([token_ids_B, status_B], 1).double()
        if plan is None:
            return head_B2
        rows_L = self._put(plan.rows)
        raw_LV, ids_L = raw_BV.index_select(0, rows_L), token_ids_B.index_select(0, rows_L)
        columns = [column.double() for column in token_logprobs(raw_LV, ids_L, plan.top_n)]
        tail_LN = torch.cat(columns, 1)
        tail_BN = tail_LN.new_zeros(len(head_B2), tail_LN.shape[1]).index_copy_(0, rows_L, tail_LN)
        return torch.cat([head_B2, tail_BN], 1)


def _penalised(x_PV: Tensor, counts_PV: Tensor, values_3P1: Tensor, plan: Penalties) -> Tensor:
    """Logits after the penalties; both arguments may be overwritten."""
    repetition_P1, presence_P1, frequency_P1 = values_3P1
    if (plan.values[0] != 1).any():
        scaled_PV = torch.where(x_PV > 0, x_PV / repetition_P1, x_PV * repetition_P1)
        x_PV = torch.where(counts_PV != 0, scaled_PV, x_PV)
    if plan.values[1:].any():
        counts_PV &= IN_PROMPT - 1
        x_PV -= frequency_P1 * counts_PV
        x_PV -= presence_P1 * (counts_PV > 0)
    return x_PV


def _status(best_B: Tensor, raw_BV: Tensor | None) -> Tensor:
    """`RowStatus` as int64 [B]. The maximum of a row carries its NaN or +inf.

    `raw_BV` is given when a ban or a mask may have hidden what the model computed.
    """
    broken_B = ~(best_B < torch.inf)
    if raw_BV is not None:
        broken_B |= ~(raw_BV.amax(-1) < torch.inf)
    status_B = (best_B == -torch.inf).long() * RowStatus.ALL_BANNED
    return status_B.masked_fill_(broken_B, RowStatus.NON_FINITE)


def unpack_bits(words_GW: Tensor, width: int) -> Tensor:
    """Turn int32 words [G, W], lowest bit first, into bool [G, width]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words_GW.device)
    bits = (words_GW[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :width].bool()


def token_logprobs(
    logits_TV: Tensor, next_ids_T: Tensor, top_n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of given tokens, and of the most likely ones at their places.

    Args:
        logits_TV: [T, V], as the model gave them.
        next_ids_T: int64 [T], the token that came at each place.
        top_n: N, may be 0.

    Returns:
        float32 [T, 1] of the given tokens, int64 [T, N] ids by falling probability, and
        float32 [T, N] of those. -inf is a token that the model rules out.
    """
    logits_TV = logits_TV.float()
    total_T1 = logits_TV.logsumexp(-1, keepdim=True)
    chosen_T1 = logits_TV.gather(1, next_ids_T[:, None]) - total_T1
    top = logits_TV.topk(min(top_n, logits_TV.shape[-1]), dim=-1)
    return chosen_T1, top.indices, top.values - total_T1
