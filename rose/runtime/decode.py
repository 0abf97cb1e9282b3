"""The decode runtime: a step of new tokens through a causal LM with paged keys and values.

A step is planned on the caller's thread, from the scheduler's plan alone, and run on the device's
worker. Sampled tokens stay on the device: the next step, which was planned before their values were
known, picks them up there, while a copy for the host travels in the `LazyTensor`.

Shape letters: T tokens of the step, B sequences, S sampled rows, C channels, V vocabulary, N tokens
that are carried over on the device, R prompt positions.
"""

import math
import operator
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rose.kernels.attention.base import AttentionBackend, GraphSupport, PagedLayout
from rose.kernels.recurrence import RecurrentBatch, States, StoredRows
from rose.models.backbone import Backbone, state_specs
from rose.models.batch import TokenBatch
from rose.runtime.decode_graphs import DecodeForward
from rose.runtime.decode_step import DecodeStep, PromptRows, padding_step, prepare_step
from rose.runtime.device import upload
from rose.runtime.errors import NonFiniteError, RequestError
from rose.runtime.graphs import Capturer, GraphCache, GraphPolicy
from rose.runtime.kv_pool import allocate_pages
from rose.runtime.lazy import LazyTensor
from rose.runtime.sampler import Sampler, token_logprobs
from rose.runtime.sampling_plan import (
    RowStatus,
    SampledRow,
    SamplingBatch,
    SamplingState,
    unpack,
)
from rose.runtime.sequence import PlanRow, Sequence, StepPlan
from rose.runtime.state_pool import allocate_states, copy_states
from rose.runtime.worker import DeviceWorker

LOGITS_BYTES = 64 << 20  # logits of prompt positions are computed in chunks of at most this size


class CausalLM(Protocol):
    """A backbone and the head that turns hidden states into logits."""

    backbone: Backbone

    def logits(self, hidden_SC: Tensor) -> Tensor:
        """Return the logits [S, V] of hidden states."""
        ...


class TokenLogprob(NamedTuple):
    """Log-probability of one token, and the most likely tokens at its place with theirs."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepResult:
    """What a step brought, one entry per row of its plan.

    `tokens` is what `Scheduler.complete` takes: a token, an error of that row alone, or None.
    """

    tokens: list[int | Exception | None]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[list[TokenLogprob]]


class DecodeRuntime:
    """Runs a causal LM step by step. Steps run in the order in which they are launched."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        worker: DeviceWorker,
        *,
        num_pages: int,
        num_slots: int,
        page_size: int = 16,
        num_snapshots: int = 0,
        eos_ids: Iterable[int] = (),
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        """Allocate the page pool and the device's per-sequence state.

        Args:
            model: the language model, its weights on `device`.
            backend: computes attention over pages.
            worker: runs the steps.
            num_pages: pages of the pool, the reserved page 0 included.
            num_slots: rows of per-sequence state: `Scheduler.num_slots`.
            page_size: tokens of a page.
            num_snapshots: states that the prefix cache can keep, of a model that has any.
            eos_ids: the checkpoint's end tokens.
            dtype: dtype of keys and values, that of the hidden states.
            device: where it all happens.

        Raises:
            ValueError: the model is not causal, so that earlier tokens would depend on later ones.
        """
        if not all(spec.causal for spec in model.backbone.attention_specs):
            raise ValueError("a bidirectional model cannot generate: its attention is not causal")
        self.num_pages = num_pages
        self.page_size = page_size
        self.vocab_size = model.backbone.vocab_size
        self._model = model
        self._backend = backend
        self._worker = worker
        self._device = torch.device(device)
        self._eos_ids = frozenset(eos_ids)
        self._sampler = Sampler(self.vocab_size, self._device)
        self._pages = allocate_pages(
            model.backbone.attention_specs, num_pages, page_size, dtype, self._device
        )
        self._states: States | None = None
        if specs := state_specs(model.backbone):
            self._states = allocate_states(specs, num_slots + num_snapshots, dtype, self._device)
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
        self._graphs: GraphCache[DecodeStep, Tensor] | None = None

    @property
    def has_states(self) -> bool:
        """Whether layers carry a state, so that pages alone do not continue a sequence."""
        return self._states is not None

    @property
    def graphs(self) -> GraphCache[DecodeStep, Tensor] | None:
        """The graph cache, None where all steps run eagerly."""
        return self._graphs

    @property
    def can_use_graphs(self) -> bool:
        """Whether steps of one token per sequence can be captured."""
        return self._states is None and self._backend.graph_support is not GraphSupport.NONE

    def use_graphs(self, capturer: Capturer, policy: GraphPolicy, max_len: int) -> None:
        """Run steps of one token per sequence as device graphs from now on.

        Args:
            capturer: makes the graphs.
            policy: their limits; `max_tokens` are sequences.
            max_len: tokens of the longest sequence.
        """
        forward = DecodeForward(
            backbone=self._model.backbone,
            backend=self._backend,
            pages=self._pages,
            max_pages=-(-max_len // self.page_size),
            dtype=self._pages.keys[0].dtype,
            device=self._device,
            eager=self._forward,
            carry=self._carry,
        )
        self._graphs = GraphCache(forward, capturer, policy)

    def warm_up(self, sizes: Iterable[int]) -> None:
        """Run steps of so many made-up sequences, until their graphs are captured if there are any.

        They lie in page 0, which is there for padding.
        """
        steps = [padding_step(size) for size in sizes]
        if self._graphs is None:
            self._worker.launch(lambda: [self._forward(step) for step in steps], len).result()
        else:
            graphs = self._graphs
            self._worker.submit(lambda: graphs.warmup(steps)).result()

    def start(self, sequence: Sequence) -> None:
        """Prepare a sequence for sampling, before its first step."""
        sequence.sampling = SamplingState(
            sequence.params,
            vocab_size=self.vocab_size,
            eos_ids=self._eos_ids,
            prompt_ids=sequence.token_ids[: sequence.prompt_len],
            output_ids=sequence.output_ids,
        )

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; steps in flight may still hold it."""
        self._sampler.release(sequence.sampling)

    def step(self, plan: StepPlan) -> LazyTensor[StepResult]:
        """Launch a step and return at once."""
        sampled = [row for row in plan.rows if row.output_index is not None]
        step = prepare_step(
            plan,
            self._plan_sampling(sampled),
            page_size=self.page_size,
            prompt_run=max(1, LOGITS_BYTES // (4 * self.vocab_size)),
        )
        return self._worker.launch(
            lambda: self._launch(step), lambda outputs: self._read(step, outputs)
        )

    def _plan_sampling(self, rows: SequenceOf[PlanRow]) -> SamplingBatch | None:
        if not rows:
            return None
        grammars = {i: row.sequence.grammar for i, row in enumerate(rows)}
        return self._sampler.plan(
            [row.sequence.sampling for row in rows],
            [row.output_index for row in rows if row.output_index is not None],
            {i: grammar.mask() for i, grammar in grammars.items() if grammar is not None},
        )

    def _launch(self, step: DecodeStep) -> list[Tensor]:
        """Launch a step; return what the host has to see, in the order in which `_read` takes it.

        Three tensors of log-probabilities per entry of `prompts`, then the sampled tokens.
        """
        self._scrub(step.scrub)
        if self._graphs is not None and step.is_decode:
            hidden_TC = self._graphs.run(step)
        else:
            hidden_TC = self._forward(step)
        outputs = [part for prompt in step.prompts for part in self._logprobs(prompt, hidden_TC)]
        if step.sampled is not None and step.sampling is not None:
            sampled_2S = self._put(step.sampled)
            hidden_SC = hidden_TC
            if sampled_2S.shape[1] < len(hidden_TC):
                hidden_SC = hidden_TC.index_select(0, sampled_2S[0])
            tokens = self._sampler.sample(self._model.logits(hidden_SC), step.sampling)
            self._last_tokens.index_copy_(0, sampled_2S[1], tokens.token_ids)
            outputs.append(tokens.packed)
        return outputs

    def _read(self, step: DecodeStep, outputs: SequenceOf[Tensor]) -> StepResult:
        """Make the result of a step's outputs once they are on the host."""
        result = StepResult(
            tokens=[None] * step.num_rows,
            logprobs=[None] * step.num_rows,
            prompt_logprobs=[[] for _ in range(step.num_rows)],
        )
        arrived = iter(outputs)
        for prompt in step.prompts:
            _add_prompt_logprobs(result, prompt, [next(arrived).tolist() for _ in range(3)])
        if step.sampling is not None:
            _add_tokens(result, step.sampled_rows, unpack(next(arrived).numpy(), step.states))
        return result

    def _forward(self, step: DecodeStep) -> Tensor:
        """Compute the hidden states [T, C] of the step's tokens."""
        input_ids = self._put(step.input_ids)
        self._carry(step, input_ids)
        layout = PagedLayout(
            self._put(step.layout.cu_seqlens_q),
            step.layout.query_lens,
            step.layout.kv_lens,
            self._put(step.layout.block_table),
            self._put(step.layout.slot_mapping),
        )
        attention = self._backend.plan_paged(layout, self._pages)
        tokens = TokenBatch(
            input_ids, self._put(step.positions), attention, recurrence=self._recurrence(step)
        )
        return self._model.backbone(tokens)

    def _recurrence(self, step: DecodeStep) -> RecurrentBatch | None:
        """Plan the layers that carry a state; a sequence at its first token starts from nothing.

        One that starts from a cached prefix gets a copy of the state at its end.
        """
        if self._states is None:
            return None
        if step.restored is not None:
            copy_states(self._states, *self._put(step.restored))
        lengths, totals = step.layout.query_lens, step.layout.kv_lens
        is_new = tuple(map(operator.eq, lengths, totals))
        stored = StoredRows(self._states, step.state_rows, is_new, step.marks)
        return RecurrentBatch(lengths, self._device, stored)

    def _carry(self, step: DecodeStep, input_ids: Tensor) -> None:
        """Fill in the tokens of steps before, which only the device knows."""
        if step.carried is not None:
            index_N, slots_N = self._put(step.carried)
            input_ids.index_copy_(0, index_N, self._last_tokens.index_select(0, slots_N))

    def _logprobs(self, prompt: PromptRows, hidden_TC: Tensor) -> tuple[Tensor, ...]:
        logits_RV = self._model.logits(
            hidden_TC[prompt.first : prompt.first + len(prompt.next_ids)]
        )
        return token_logprobs(logits_RV, self._put(torch.tensor(prompt.next_ids)), prompt.top_n)

    def _scrub(self, pages: list[int]) -> None:
        if pages:
            index = self._put(torch.tensor(pages))
            for tensor in (*self._pages.keys, *self._pages.values):
                tensor.index_fill_(0, index, 0)

    def _put(self, tensor: Tensor) -> Tensor:
        return upload(tensor, self._device)


def _add_prompt_logprobs(
    result: StepResult, prompt: PromptRows, parts: list[list[list[float]]]
) -> None:
    """Add what `token_logprobs` found for some positions of a prompt."""
    chosen, top_ids, top = parts
    entries = [
        TokenLogprob(token_id, value[0], [int(i) for i in ids], values)
        for token_id, value, ids, values in zip(prompt.next_ids, chosen, top_ids, top, strict=True)
    ]
    if any(math.isnan(entry.logprob) for entry in entries):
        result.tokens[prompt.row] = NonFiniteError("the logits of the prompt are not finite")
    result.prompt_logprobs[prompt.row] += entries


def _add_tokens(result: StepResult, rows: list[int], sampled: list[SampledRow]) -> None:
    for row, token in zip(rows, sampled, strict=True):
        if result.tokens[row] is None:  # the prompt may have failed already
            result.tokens[row] = _token_or_error(token)
        if token.logprob is not None:
            result.logprobs[row] = TokenLogprob(
                token.token_id, token.logprob, token.top_ids, token.top_logprobs
            )


def _token_or_error(sampled: SampledRow) -> int | Exception:
    if sampled.status == RowStatus.NON_FINITE:
        return NonFiniteError("the model computed logits that are not finite")
    if sampled.status == RowStatus.ALL_BANNED:
        return RequestError("every token is banned, none is left to choose", "logit_bias")
    return sampled.token_id
