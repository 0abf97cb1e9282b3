"""The host's side of sampling: what is kept of each sequence, the plan of a step, its outcome.

Shape letters: B rows of the batch, S rows drawn at random, P rows with penalties, L rows with
log-probabilities, G rows with a grammar, E edits of single logits, V vocabulary, N most likely
tokens, W words of 32 bits.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rose.kernels.sampling import FEW, Cut
from rose.runtime.options import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures under this one take the most likely token
BAN_FROM = -100.0  # a `logit_bias` of this or less bans the token, as OpenAI's API has it
FLOAT32_MAX = float(np.finfo(np.float32).max)

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Float32s = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]


class RowStatus(IntEnum):
    """How the sampling of one row went."""

    OK = 0
    NON_FINITE = 1  # the logits hold NaN or +inf
    ALL_BANNED = 2  # no token is left to choose from


class SampledRow(NamedTuple):
    """One row's outcome on the host. `logprob` is None when none was asked for."""

    token_id: int
    status: RowStatus
    logprob: float | None
    top_ids: list[int]
    top_logprobs: list[float]


def seed_key(seed: int | None) -> int:
    """Where the random numbers of a seed start; None draws a fresh seed."""
    value = int.from_bytes(os.urandom(8), "little") if seed is None else seed & _MASK64
    return int(_mix64(np.array([value], np.uint64))[0])


def row_keys(keys: npt.NDArray[np.uint64], indices: Ints) -> npt.NDArray[np.int32]:
    """The random keys, [2, S], of sequences with these keys at these output indices.

    They are the halves of what the SplitMix64 generator (Steele et al., 2014) gives there.
    """
    counters = indices.astype(np.uint64) + np.uint64(1)
    bits = _mix64(keys + counters * np.uint64(_GOLDEN))
    halves = np.stack([bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)])
    return halves.astype(np.uint32).view(np.int32)


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SamplingState:
    """What the sampler keeps of one sequence, from its admission to its end.

    Args:
        params: how its tokens are chosen.
        vocab_size: rows of the logits; ids outside are left out of biases and bans.
        eos_ids: the checkpoint's end tokens.
        prompt_ids: read when a penalty is in use.
        output_ids: the caller's own growing list of the tokens that came out. It is read when a
            sequence with penalties goes on from tokens that the sampler did not count.

    Attributes:
        end_ids: tokens that end the sequence. A grammar ends by an end token, so `ignore_eos`
            does not hold for it.
        needs_last_token: the mask of a grammar follows from the last token, so the step after
            one cannot be planned before its token has come to the host.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_ids: Iterable[int] = (),
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
    ) -> None:
        """Settle what does not change from step to step."""
        self.params = params
        self.prompt_ids = prompt_ids
        self.output_ids = output_ids
        self.key = seed_key(params.seed)
        self.needs_last_token = params.grammar is not None
        ends = set(params.stop_token_ids)
        if self.needs_last_token or not params.ignore_eos:
            ends.update(eos_ids)
        self.end_ids = frozenset(ends)
        self.banned_ids = np.array([i for i in ends if 0 <= i < vocab_size], np.int64)
        self._settle_bias(vocab_size)
        self._settle_cuts(vocab_size)
        self._settle_penalties()
        self.slot: int | None = None  # its row in the sampler's table of counts
        self.counted = -1  # tokens of the output in that row

    def _settle_bias(self, vocab_size: int) -> None:
        kept = {i: b for i, b in self.params.logit_bias.items() if 0 <= i < vocab_size}
        self.bias_ids = np.array(list(kept), np.int64)
        values = _float32(list(kept.values()))
        self.bias_values = np.where(values <= BAN_FROM, np.float32(-np.inf), values)

    def _settle_cuts(self, vocab_size: int) -> None:
        params = self.params
        self.top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        # Comparisons are such that a NaN takes the safe side.
        sampled = params.temperature >= GREEDY_BELOW and self.top_k > 1
        self.greedy = not sampled
        self.temperature = min(params.temperature, FLOAT32_MAX) if sampled else 1.0
        self.top_p = params.top_p if params.top_p < 1 else 1.0
        self.min_p = min(params.min_p, 1.0) if params.min_p > 0 else 0.0

    def _settle_penalties(self) -> None:
        p = self.params
        wanted = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        self.penalties = _float32(wanted)
        self.penalised = wanted != (1, 0, 0)

    def bans(self, index: int) -> bool:
        """Whether the end tokens are banned for output token `index`.

        Never under a grammar: where it is complete, only an end token is left.
        """
        return index < self.params.min_tokens and not self.needs_last_token


def _float32(values: Sequence[float]) -> Float32s:
    """Cut values to the finite range of float32, so that the conversion cannot overflow."""
    return np.clip(np.array(values, np.float64), -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


class RandomRows(NamedTuple):
    """Rows that are drawn at random and cut in the same way."""

    cut: Cut
    rows: Ints  # [S]
    knobs: Floats  # [6, S], in the order of `Knobs`


class Refill(NamedTuple):
    """A row of the table of counts to write anew before it is read."""

    slot: int
    prompt_ids: Ints
    output_ids: Ints


class Penalties(NamedTuple):
    """The rows with penalties."""

    rows: Ints  # [P]
    values: Float32s  # [3, P]: repetition, presence, frequency
    slots: Ints  # [P]: rows of the table of counts
    refills: list[Refill]


class Bias(NamedTuple):
    """What is added to single logits, by position in the flat [B * V] logits."""

    places: Ints  # [E]
    values: Float32s  # [E]


class Grammar(NamedTuple):
    """The rows with a grammar; bit i of word w allows the id 32 w + i."""

    rows: Ints  # [G]
    masks: Words  # [G, W]


class Logprobs(NamedTuple):
    """The rows with log-probabilities, and the largest number of most likely tokens."""

    rows: Ints  # [L]
    top_n: int


@dataclass(slots=True, kw_only=True)
class SamplingBatch:
    """The plan of one step, all of it on the host. What no row needs is None."""

    size: int
    random: list[RandomRows]
    penalties: Penalties | None
    bias: Bias | None
    bans: Ints | None  # [E], positions in the flat [B * V] logits
    grammar: Grammar | None
    logprobs: Logprobs | None


class CountSlots:
    """Gives each sequence with penalties a row of the table of counts, and keeps them in step."""

    def __init__(self) -> None:
        """Start with no row given."""
        self._free: list[int] = []
        self._given = 0

    def plan(self, states: Sequence[SamplingState], indices: Sequence[int]) -> Penalties | None:
        """Plan the penalties of a step."""
        rows = [row for row, state in enumerate(states) if state.penalised]
        if not rows:
            return None
        refills = [self._count(states[row], indices[row]) for row in rows]
        return Penalties(
            np.array(rows, np.int64),
            np.stack([states[row].penalties for row in rows], 1),
            np.array([states[row].slot for row in rows], np.int64),
            [refill for refill in refills if refill is not None],
        )

    def release(self, state: SamplingState) -> None:
        """Take back a row; steps already planned may still use it."""
        if state.slot is not None:
            self._free.append(state.slot)
            state.slot, state.counted = None, -1

    def _count(self, state: SamplingState, index: int) -> Refill | None:
        """Count one more token; a refill when the row does not hold the first `index` ones."""
        expected, state.counted = state.counted, index + 1
        if state.slot is None:
            state.slot = self._free.pop() if self._free else self._grow()
        if expected == index:
            return None
        assert len(state.output_ids) >= index, "counts are rebuilt from known tokens only"
        prompt = np.array(state.prompt_ids, np.int64)
        return Refill(state.slot, prompt, np.array(state.output_ids[:index], np.int64))

    def _grow(self) -> int:
        self._given += 1
        return self._given - 1


def plan_random(
    states: Sequence[SamplingState], indices: Sequence[int], vocab_size: int
) -> list[RandomRows]:
    """Plan the rows that are drawn at random, with their random numbers."""
    groups: dict[Cut, list[int]] = {}
    for row, state in enumerate(states):
        if not state.greedy:
            groups.setdefault(_cut(state, vocab_size), []).append(row)
    return [_plan_group(cut, rows, states, indices) for cut, rows in groups.items()]


def _cut(state: SamplingState, vocab_size: int) -> Cut:
    if state.top_k <= FEW < vocab_size:
        return Cut.FEW
    if state.top_k < vocab_size or state.top_p < 1:
        return Cut.ANY
    return Cut.FLOOR if state.min_p > 0 else Cut.NONE


def _plan_group(
    cut: Cut, rows: list[int], states: Sequence[SamplingState], indices: Sequence[int]
) -> RandomRows:
    chosen = [states[row] for row in rows]
    keys = np.array([state.key for state in chosen], np.uint64)
    knobs = np.empty((6, len(rows)))
    knobs[:2] = row_keys(keys, np.array([indices[row] for row in rows], np.int64))
    knobs[2:] = np.array([(s.temperature, s.top_k, s.top_p, s.min_p) for s in chosen]).T
    return RandomRows(cut, np.array(rows, np.int64), knobs)


def plan_bias(states: Sequence[SamplingState], vocab_size: int) -> Bias | None:
    """Plan `logit_bias`."""
    rows = [row for row, state in enumerate(states) if len(state.bias_ids)]
    if not rows:
        return None
    flat = np.concatenate([states[row].bias_ids + row * vocab_size for row in rows])
    return Bias(flat, np.concatenate([states[row].bias_values for row in rows]))


def plan_bans(
    states: Sequence[SamplingState], indices: Sequence[int], vocab_size: int
) -> Ints | None:
    """Plan the bans of end tokens while fewer than `min_tokens` are out."""
    rows = [row for row, state in enumerate(states) if state.bans(indices[row])]
    if not rows:
        return None
    return np.concatenate([states[row].banned_ids + row * vocab_size for row in rows])


def plan_grammar(masks: Mapping[int, Words]) -> Grammar | None:
    """Plan the masks of grammars, by row."""
    if not masks:
        return None
    return Grammar(np.array(list(masks), np.int64), np.stack(list(masks.values())))


def plan_logprobs(states: Sequence[SamplingState]) -> Logprobs | None:
    """Plan the log-probabilities."""
    rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    if not rows:
        return None
    return Logprobs(np.array(rows, np.int64), max(states[r].params.logprobs or 0 for r in rows))


def unpack(packed: Floats, states: Sequence[SamplingState]) -> list[SampledRow]:
    """Read `SampledTokens.packed` once it is on the host, for the states that were planned."""
    return [_unpack_row(row, state) for row, state in zip(packed, states, strict=True)]


def _unpack_row(row: Floats, state: SamplingState) -> SampledRow:
    token_id, status = int(row[0]), RowStatus(int(row[1]))
    wanted = state.params.logprobs
    if wanted is None:
        return SampledRow(token_id, status, None, [], [])
    top_n = (len(row) - 3) // 2
    top_ids = row[3 : 3 + top_n][:wanted].astype(np.int64).tolist()
    return SampledRow(token_id, status, float(row[2]), top_ids, row[3 + top_n :][:wanted].tolist())
