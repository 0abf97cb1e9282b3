"""From a checkpoint and options to loaded weights and the runtimes that serve them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from msgspec.structs import replace

from rose.kernels.attention.base import AttentionBackend
from rose.kernels.attention.choice import choose
from rose.kernels.delta_rule import CHUNK
from rose.models.backbone import state_specs
from rose.models.card import ModelCard
from rose.models.loader import LoadedModel, load
from rose.models.quantizing import prepare_loaded
from rose.runtime.cuda_graphs import CudaCapturer
from rose.runtime.decode import DecodeRuntime
from rose.runtime.embedding import EmbeddingRuntime
from rose.runtime.generation import GenerationLoop
from rose.runtime.graph_setup import decode_with_graphs, embed_with_graphs
from rose.runtime.graphs import GraphCache, WarmupShape
from rose.runtime.kv_cache import PagePool
from rose.runtime.kv_pool import (
    allocate_pages,
    cache_budget,
    choose_num_pages,
    memory_of_machine,
)
from rose.runtime.memory import keep_freed_memory
from rose.runtime.scheduler import SLOTS_PER_SEQUENCE, Scheduler
from rose.runtime.scoring import ScoringModel
from rose.runtime.snapshots import Snapshots
from rose.runtime.state_pool import StateSize, fit_states
from rose.runtime.structured import GrammarCompiler
from rose.runtime.worker import DeviceWorker

log = logging.getLogger(__name__)

PAGE_SIZE = 16  # tokens
# Tokens of a step, prompts and decodes together, where the user does not say. A step with a chunk
# of a prompt holds up every running stream: on a CPU 256 tokens of a small model take 0.3 s.
STEP_TOKENS_CPU = 256
STEP_TOKENS_GPU = 2048
MOST_SEQUENCES = 65_536  # at one time
# A batch of pairs whose prompts are shared may have so many times the tokens of another batch.
SHARED_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a user can choose about a model. None and "auto" leave it to the checkpoint.

    `warmup` are batches to run before the model is ready. Batches above `max_graph_tokens` are
    never run as device graphs: None measures the limit, 0 turns graphs off.
    """

    path: str
    name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    attention: str = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_num_seqs: int = 32
    kv_cache_memory: int | None = None
    deterministic: bool = False
    tasks: tuple[str, ...] = ()
    warmup: tuple[WarmupShape, ...] = ()
    max_graph_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A decode runtime, its page pool, and what a loop over both needs."""

    runtime: DecodeRuntime
    scheduler: Scheduler
    grammars: GrammarCompiler

    def make_loop(self, on_arrival: Callable[[], None] | None = None) -> GenerationLoop:
        """Make the loop; there can be one, since it owns the scheduler's state."""
        return GenerationLoop(
            self.runtime, self.scheduler, grammars=self.grammars, on_arrival=on_arrival
        )


@dataclass(slots=True)
class ServedModel:
    """A loaded model and its runtimes, which share one worker and one copy of the weights."""

    loaded: LoadedModel
    card: ModelCard
    worker: DeviceWorker
    embedding: EmbeddingRuntime | None
    generation: Generation | None
    scoring: EmbeddingRuntime | None = None
    max_batch_tokens: int = 0
    max_score_tokens: int = 0

    @property
    def packed(self) -> list[EmbeddingRuntime]:
        """The runtimes of packed texts: the one that embeds, the one that scores."""
        return [runtime for runtime in (self.embedding, self.scoring) if runtime is not None]

    @property
    def graphs(self) -> dict[str, GraphCache[Any, Any]]:
        """The graph caches, by what they are for: "embed", "score", "decode"."""
        caches = {
            "embed": self.embedding.graphs if self.embedding else None,
            "score": self.scoring.graphs if self.scoring else None,
            "decode": self.generation.runtime.graphs if self.generation else None,
        }
        return {name: cache for name, cache in caches.items() if cache is not None}

    def warm_up(self, shapes: Sequence[WarmupShape]) -> None:
        """Run batches of these shapes; each runtime takes those that are for it.

        Raises:
            ValueError: a text is longer than the model's limit.
        """
        limit = self.card.max_model_len
        if any((shape.tokens or 0) > limit for shape in shapes):
            raise ValueError(f"--warmup: the model takes texts of up to {limit} tokens")
        for runtime in self.packed:
            runtime.warm_up(shapes, self.card.vocab_size)
        if self.generation:
            self.generation.runtime.warm_up(s.sequences for s in shapes if s.tokens is None)

    def close(self) -> None:
        """Stop the worker; steps that wait fail."""
        self.worker.close()


def build(options: ModelOptions) -> ServedModel:
    """Load a checkpoint and make its runtimes.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ValueError: an option does not fit, for instance an attention back end that cannot serve it.
    """
    device = choose_device(options.device)
    loaded = load(
        options.path,
        dtype=options.dtype,
        quantization=options.quantization,
        device=device,
        max_model_len=options.max_model_len,
        tasks=options.tasks or None,
        name=options.name,
    )
    prepare_loaded(loaded)
    if loaded.device.type == "cpu":
        keep_freed_memory()
    worker = DeviceWorker(device)
    generation = _generation(loaded, worker, options)
    served = ServedModel(
        loaded=loaded,
        card=_complete_card(loaded.card, generation),
        worker=worker,
        embedding=_embedding_runtime(loaded, worker, options),
        generation=generation,
        scoring=_scoring_runtime(loaded, worker, options),
    )
    if served.packed:  # they share the backbone, which takes nearly all of the time
        served.max_batch_tokens = options.max_batch_tokens or served.packed[0].measure_saturation(
            loaded.card.max_model_len, loaded.card.vocab_size
        )
    if served.scoring:
        served.max_score_tokens = _share_prefixes(served, options)
    if loaded.device.type == "cuda" and options.max_graph_tokens != 0:
        _use_graphs(served, options)
    try:
        served.warm_up(options.warmup)
    except BaseException:
        served.close()
        raise
    return served


def _share_prefixes(served: ServedModel, options: ModelOptions) -> int:
    """Let a ranker that is a language model compute a query's prompt once for its documents.

    On a CPU only, where it was measured. Returns the tokens of a batch to score: more than are
    best without, since most batches are then smaller than they look.
    """
    loaded, budget = served.loaded, served.max_batch_tokens
    facts = loaded.card.scoring
    assert served.scoring is not None
    assert facts is not None
    is_plain = facts.kind == "yes_no" and not state_specs(loaded.backbone)
    if not is_plain or options.deterministic or loaded.device.type != "cpu":
        return budget
    tokens = options.max_batch_tokens or SHARED_BATCHES * budget
    num_pages = 1 + 2 * -(-tokens // PAGE_SIZE)  # texts share at least two pages' worth
    specs = loaded.backbone.attention_specs
    pages = allocate_pages(specs, num_pages, PAGE_SIZE, loaded.dtype, loaded.device)
    served.scoring.share_prefixes(_choose_backend(loaded, options, PAGE_SIZE), pages)
    return tokens


def _use_graphs(served: ServedModel, options: ModelOptions) -> None:
    capturer = CudaCapturer(served.loaded.device)
    for runtime in served.packed:
        embed_with_graphs(runtime, served.card, capturer, options.max_graph_tokens)
    if served.generation:
        decode_with_graphs(
            served.generation.runtime,
            capturer,
            options.max_num_seqs,
            served.generation.scheduler.max_len,
        )


def _choose_backend(
    loaded: LoadedModel, options: ModelOptions, page_size: int | None
) -> AttentionBackend:
    specs = loaded.backbone.attention_specs
    return choose(options.attention, specs, loaded.dtype, loaded.device, page_size)


def _embedding_runtime(
    loaded: LoadedModel, worker: DeviceWorker, options: ModelOptions
) -> EmbeddingRuntime | None:
    if loaded.embedding is None:
        return None
    return EmbeddingRuntime(
        loaded.embedding,
        _choose_backend(loaded, options, None),
        worker,
        device=loaded.device,
        deterministic=options.deterministic,
        recurrent=bool(state_specs(loaded.backbone)),
    )


def _scoring_runtime(
    loaded: LoadedModel, worker: DeviceWorker, options: ModelOptions
) -> EmbeddingRuntime | None:
    facts = loaded.card.scoring
    if loaded.classifier is None or facts is None:
        return None
    return EmbeddingRuntime(
        ScoringModel(loaded.classifier),
        _choose_backend(loaded, options, None),
        worker,
        device=loaded.device,
        deterministic=options.deterministic,
        segment_ids=facts.segment_ids,
        recurrent=bool(state_specs(loaded.backbone)),
    )


def _generation(
    loaded: LoadedModel, worker: DeviceWorker, options: ModelOptions
) -> Generation | None:
    facts = loaded.card.generation
    if loaded.lm is None or facts is None:
        return None
    _check_room(options, loaded.device)
    states = _state_size(loaded, options)
    num_pages = choose_num_pages(
        loaded.backbone.attention_specs,
        loaded.dtype,
        loaded.device,
        page_size=PAGE_SIZE,
        max_num_seqs=states.max_num_seqs,
        max_model_len=loaded.card.max_model_len,
        cache_bytes=options.kv_cache_memory,
        state_bytes=states.num_bytes,
    )
    log.info("KV cache: %d pages of %d tokens", num_pages - 1, PAGE_SIZE)
    snapshots = None
    if states.num_bytes:
        first = SLOTS_PER_SEQUENCE * states.max_num_seqs
        snapshots = Snapshots(states.num_snapshots, first, grid=CHUNK)
    step_tokens = STEP_TOKENS_CPU if loaded.device.type == "cpu" else STEP_TOKENS_GPU
    scheduler = Scheduler(
        PagePool(num_pages, PAGE_SIZE, snapshots=snapshots),
        max_num_seqs=states.max_num_seqs,
        max_step_tokens=max(options.max_batch_tokens or step_tokens, states.max_num_seqs),
        max_model_len=loaded.card.max_model_len,
        eos_ids=facts.eos_token_ids,
    )
    runtime = DecodeRuntime(
        loaded.lm,
        _choose_backend(loaded, options, PAGE_SIZE),
        worker,
        num_pages=num_pages,
        num_slots=scheduler.num_slots,
        num_snapshots=states.num_snapshots,
        page_size=PAGE_SIZE,
        eos_ids=facts.eos_token_ids,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    vocab_size = loaded.card.vocab_size
    grammars = GrammarCompiler(loaded.tokenizer_json, vocab_size, facts.eos_token_ids)
    return Generation(runtime, scheduler, grammars)


def _check_room(options: ModelOptions, device: torch.device) -> None:
    """Refuse sizes that no machine has: the lists of what is free alone would take its memory.

    Raises:
        ValueError: an option asks for too much.
    """
    if options.max_num_seqs > MOST_SEQUENCES:
        raise ValueError(
            f"max_num_seqs: {options.max_num_seqs} is more than the {MOST_SEQUENCES} sequences "
            "that can be generated at one time"
        )
    if device.type != "cpu" or options.kv_cache_memory is None:
        return
    total = memory_of_machine()
    if options.kv_cache_memory > total:
        raise ValueError(
            f"kv_cache_memory: {options.kv_cache_memory} bytes are more than this machine has "
            f"({total})"
        )


def _state_size(loaded: LoadedModel, options: ModelOptions) -> StateSize:
    """Size the states of a model with layers that carry one from token to token, beside its pages.

    Some more are kept for the prefix cache, at ends of pages.
    """
    specs = state_specs(loaded.backbone)
    if not specs:
        return StateSize(options.max_num_seqs, 0, 0)
    budget = cache_budget(loaded.device, options.kv_cache_memory)
    size = fit_states(specs, loaded.dtype, options.max_num_seqs, budget)
    log.info(
        "states: %d bytes for %d sequences at once and %d kept ones",
        size.num_bytes,
        size.max_num_seqs,
        size.num_snapshots,
    )
    return size


def _complete_card(card: ModelCard, generation: Generation | None) -> ModelCard:
    """Add to the card what the page pool and the installed extras decide."""
    if generation is None or card.generation is None:
        return card
    facts = replace(
        card.generation,
        max_kv_tokens=generation.scheduler.max_len,
        structured_output=find_spec("llguidance") is not None,
    )
    return replace(card, generation=facts)


def choose_device(name: str) -> str:
    """Return the device to use: with "auto" a CUDA device if there is one, else the CPU.

    Raises:
        ValueError: torch does not know the device, or it is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return name
