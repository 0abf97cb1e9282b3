"""Chooses the next token of each row from the model's logits, on the logits' own device.

The host plans a step (`Sampler.plan`) from what it knows without the tokens on their way: the
parameters of each sequence and the index of the token to come. The device then samples
(`Sampler.sample`) without waiting for the host. What depends on the tokens themselves, the counts
behind the penalties, stays on the device.

A row's token depends on its own logits, parameters, seed and index, never on its neighbours:

- Its random number is a hash of (seed, index), so it is the same in any batch.
- Probabilities become integers (units of 2**-44) held in float64. Sums of those are exact, hence
  the same in any order of addition, whatever kernel the batch's shape selects.
- top_k, top_p and min_p cut by value (tokens as likely as the last one kept stay too), and the
  token is found by inverting the cumulative distribution in the order of the ids.

Log-probabilities are those of the model's own logits, before every step of `SamplingParams`.

Shape letters: B rows of the batch, S rows sampled at random, F rows with top_k or top_p, P rows
with penalties, K rows of the table of counts, G rows with a grammar, L rows with
log-probabilities, T tokens, V vocabulary, N most likely tokens, W words of 32 bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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

UNIT = 2.0**44  # probability 1 as an integer; sums over any vocabulary stay below 2**53
CANDIDATES = (512, 8192)  # how many of the most likely tokens to look at before all are sorted
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
            random=plan_random(states, indices),
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
        if batch.random is not None:
            self._draw(final_BV, best_B, token_ids_B, batch.random)
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
        rows_P = self._put(plan.rows)
        repetition_P1, presence_P1, frequency_P1 = self._put(plan.values)[:, :, None]
        counts_PV = self._counts_KV.index_select(0, self._put(plan.slots))
        x_PV = out_BV.index_select(0, rows_P)
        scaled_PV = torch.where(x_PV > 0, x_PV / repetition_P1, x_PV * repetition_P1)
        x_PV = torch.where(counts_PV != 0, scaled_PV, x_PV)
        counts_PV &= IN_PROMPT - 1
        x_PV -= frequency_P1 * counts_PV
        x_PV -= presence_P1 * (counts_PV > 0)
        out_BV.index_copy_(0, rows_P, x_PV)

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

    def _draw(
        self, logits_BV: Tensor, best_B: Tensor, token_ids_B: Tensor, plan: RandomRows
    ) -> None:
        """Replace the ids of the rows that are drawn at random."""
        rows_S = self._put(plan.rows)
        if len(plan.rows) < len(logits_BV):
            logits_BV, best_B = logits_BV.index_select(0, rows_S), best_B.index_select(0, rows_S)
        uniform_S1, temperature_S1, top_p_S1, min_p_S1 = self._put(plan.controls)[:, :, None]
        weights_SV = _weights(logits_BV, best_B[:, None], temperature_S1)
        floor_S1 = min_p_S1 * weights_SV.amax(-1, keepdim=True)
        if len(plan.cut_rows):
            rows_F, k_F = self._put(plan.cut_rows), plan.top_k[plan.cut_rows]
            weights_FV, top_p_F1 = weights_SV.index_select(0, rows_F), top_p_S1[rows_F]
            cutoff_F1 = _cutoff(weights_FV, self._put(k_F)[:, None], top_p_F1, int(k_F.max()))
            floor_S1[rows_F] = torch.maximum(floor_S1[rows_F], cutoff_F1)
        if len(plan.cut_rows) or plan.controls[3].any():
            weights_SV = weights_SV.masked_fill_(weights_SV < floor_S1, 0.0)
        token_ids_B.index_copy_(0, rows_S, _invert(weights_SV, uniform_S1))

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


def _status(best_B: Tensor, raw_BV: Tensor | None) -> Tensor:
    """`RowStatus` as int64 [B]. The maximum of a row carries its NaN or +inf.

    `raw_BV` is given when a ban or a mask may have hidden what the model computed.
    """
    broken_B = ~(best_B < torch.inf)
    if raw_BV is not None:
        broken_B |= ~(raw_BV.amax(-1) < torch.inf)
    status_B = (best_B == -torch.inf).long() * RowStatus.ALL_BANNED
    return status_B.masked_fill_(broken_B, RowStatus.NON_FINITE)


def _weights(logits_SV: Tensor, best_S1: Tensor, temperature_S1: Tensor) -> Tensor:
    """Probabilities in integer units of 1 / UNIT, float64 [S, V].

    The shift by the maximum comes first: it puts the most likely token at 0 for any temperature.
    """
    scaled_SV = (logits_SV - best_S1).div_(temperature_S1.float())
    return scaled_SV.softmax(-1).double().mul_(UNIT).floor_()


def _cutoff(weights_FV: Tensor, top_k_F1: Tensor, top_p_F1: Tensor, k_max: int) -> Tensor:
    """The least weight [F, 1] that top_k, and then top_p among those, keep.

    Sorting a vocabulary costs far more than finding its largest few, so first it looks at few.
    Whether they are enough is known beforehand from top_k; for top_p it takes a look at the
    result, which is free on a CPU only.
    """
    vocab_size = weights_FV.shape[-1]
    for count in CANDIDATES:
        known = k_max <= count
        if count < vocab_size and (known or not weights_FV.is_cuda):
            cutoff_F1, true_F1 = _cutoff_among(weights_FV, count, top_k_F1, top_p_F1)
            if known or bool(true_F1.all()):
                return cutoff_F1
    return _cutoff_among(weights_FV, vocab_size, top_k_F1, top_p_F1)[0]


def _cutoff_among(
    weights_FV: Tensor, count: int, top_k_F1: Tensor, top_p_F1: Tensor
) -> tuple[Tensor, Tensor]:
    """The cutoff seen from the `count` largest weights, and whether it is the true one."""
    largest_FN = _largest(weights_FV, count)
    unlimited_F1 = top_k_F1 >= weights_FV.shape[-1]
    kth_F1 = largest_FN.gather(1, top_k_F1.clamp(max=count) - 1).masked_fill(unlimited_F1, 0.0)
    kept_F1 = torch.where(weights_FV >= kth_F1, weights_FV, 0.0).sum(-1, keepdim=True)
    goal_F1 = top_p_F1 * kept_F1
    sums_FN = largest_FN.cumsum(-1)
    needed_F1 = (sums_FN - largest_FN < goal_F1).sum(-1, keepdim=True).clamp(min=1)
    pth_F1 = largest_FN.gather(1, needed_F1 - 1)
    true_F1 = (top_k_F1 <= count) | (unlimited_F1 & (sums_FN[:, -1:] >= goal_F1))
    return torch.maximum(kth_F1, pth_F1), true_F1


def _largest(weights_FV: Tensor, count: int) -> Tensor:
    """The `count` largest weights of each row, largest first."""
    if count < weights_FV.shape[-1]:
        return weights_FV.topk(count, dim=-1).values
    return weights_FV.sort(dim=-1, descending=True).values


def _invert(weights_SV: Tensor, uniform_S1: Tensor) -> Tensor:
    """The id [S] at which the cumulative weight passes `uniform` of the whole.

    uniform is at most 1 - 2**-53, so the product rounds to less than the whole, and the id found
    has a weight above 0. A row without any weight (it failed) gives some valid id.
    """
    sums_SV = weights_SV.cumsum(-1)
    goal_S1 = uniform_S1 * sums_SV[:, -1:]
    found_S1 = torch.searchsorted(sums_SV, goal_S1, right=True)
    return found_S1.squeeze(1).clamp_(max=weights_SV.shape[-1] - 1)


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
