"""Compare ROSE's CPU kernels with torch ops: whole models in one process, taking turns.

    python tools/bench_cpu_kernels.py .models/all-MiniLM-L6-v2 .models/SmolLM2-135M-Instruct

Both sides are ROSE with the same weights and token ids; one has the compiled kernels, the other
torch ops in their place. Vectors and greedy tokens are compared too. Ratios are of the medians and
of the quickest runs: on a busy machine, believe the latter.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from rose.kernels.cpu import PackedMatrix, load_library, replaced
from rose.models.layers import Projection
from rose.models.loader import load
from rose.runtime.build import ModelOptions, ServedModel, build
from rose.runtime.embedding import EmbedBatch
from rose.runtime.options import SamplingParams

EMBED_LOADS = ((16,), (128,), (512,), (16,) * 8, (512,) * 5)
STREAMS = (1, 8, 16)
PROMPT, NEW = 64, 24  # tokens
ROWS = (1, 8, 16, 64, 128, 512)


@dataclass(frozen=True)
class Sides:
    """A model with the kernels and one with torch ops."""

    kernels: ServedModel
    torch_ops: ServedModel

    @classmethod
    def of(cls, path: Path) -> "Sides":
        """Load a model twice."""
        options = ModelOptions(path=str(path), device="cpu", dtype="float32", max_batch_tokens=512)
        with replaced(None):
            torch_ops = build(options)
        return cls(build(options), torch_ops)


Run = Callable[[ServedModel], object]


def compare(sides: Sides, run: Callable[[ServedModel], float], repeats: int) -> str:
    """Let both sides take turns; `run` returns seconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for side, model in enumerate((sides.kernels, sides.torch_ops)):
            with nullcontext() if side == 0 else replaced(None):
                seconds = run(model)
            if turn:
                times[side].append(1e3 * seconds)
    return describe(*times)


def describe(ours: Sequence[float], others: Sequence[float]) -> str:
    """Medians and quickest runs in ms, and their ratios."""
    middle = statistics.median(ours), statistics.median(others)
    best = min(ours), min(others)
    return (
        f"median {middle[0]:8.2f} / {middle[1]:8.2f} ms = {middle[1] / middle[0]:5.2f}x   "
        f"quickest {best[0]:8.2f} / {best[1]:8.2f} ms = {best[1] / best[0]:5.2f}x"
    )


def bench_embedding(sides: Sides, repeats: int) -> None:
    """Time whole forward passes of pre-tokenised texts."""
    vocab = sides.kernels.card.vocab_size
    for lengths in EMBED_LOADS:
        ids = np.random.default_rng(0).integers(999, vocab, sum(lengths), dtype=np.int32)
        counts = np.array(lengths, np.int32)
        batch = EmbedBatch(ids, counts, np.zeros(len(lengths), np.int32))

        def step(model: ServedModel, batch: EmbedBatch = batch) -> torch.Tensor:
            assert model.embedding is not None
            return model.embedding.step(batch).result()

        def timed(model: ServedModel, step: Run = step) -> float:
            began = time.perf_counter()
            step(model)
            return time.perf_counter() - began

        ours = step(sides.kernels)
        with replaced(None):
            similarity = F.cosine_similarity(ours, step(sides.torch_ops)).min().item()
        assert similarity > 0.99999, similarity
        turns = max(3, min(repeats, 4000 // sum(lengths)))
        print(
            f"embed {len(lengths):2} x {lengths[0]:3}: {compare(sides, timed, turns)}", flush=True
        )


def bench_decode(sides: Sides, repeats: int) -> None:
    """Time decode steps of greedy streams, without their prompts."""
    vocab = sides.kernels.card.vocab_size
    for streams in STREAMS:
        prompts = np.random.default_rng(streams).integers(99, vocab, (streams, PROMPT)).tolist()
        tokens: dict[int, list[list[int]]] = {}

        def timed(
            model: ServedModel,
            prompts: list[list[int]] = prompts,
            tokens: dict[int, list[list[int]]] = tokens,
        ) -> float:
            seconds, tokens[id(model)] = decode(model, prompts)
            return seconds

        print(f"decode {streams:2} streams: {compare(sides, timed, repeats)}", flush=True)
        assert len(tokens) == 2
        same = tokens[id(sides.kernels)] == tokens[id(sides.torch_ops)]
        print(f"  greedy tokens are {'equal' if same else 'different'}")


def decode(model: ServedModel, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Generate; returns seconds per step after the first tokens, and the tokens."""
    assert model.generation is not None
    loop = model.generation.make_loop()
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(outputs, prompts, strict=True):
        loop.add(name, prompt, params)
    began, before = 0.0, 0
    while loop.has_work:
        while loop.advance():
            pass
        for event in loop.collect(timeout=60):
            outputs[event.request_id] += event.token_ids
        if not began and all(outputs.values()):
            began, before = time.perf_counter(), sum(map(len, outputs.values()))
    steps = (sum(map(len, outputs.values())) - before) / len(prompts)
    return (time.perf_counter() - began) / steps, list(outputs.values())


@torch.inference_mode()
def bench_linears(path: Path, repeats: int) -> None:
    """Time all projections of a model one after another, so that weights come from memory."""
    library = load_library()
    assert library is not None, "there are no CPU kernels"
    loaded = load(path, dtype="float32")
    model = loaded.lm or loaded.backbone
    assert isinstance(model, torch.nn.Module)
    layers = [module for module in model.modules() if isinstance(module, Projection)]
    packed = [PackedMatrix(library, layer.weight, layer.bias) for layer in layers]
    megabytes = sum(matrix.nbytes for matrix in packed) / 1e6
    for rows in ROWS:
        inputs = {matrix.inputs: torch.randn(rows, matrix.inputs) for matrix in packed}
        ours, others = [], []
        for _ in range(repeats if rows < 256 else 3):
            began = time.perf_counter()
            for matrix in packed:
                matrix(inputs[matrix.inputs])
            ours.append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            for layer in layers:
                F.linear(inputs[layer.weight.shape[1]], layer.weight, layer.bias)
            others.append(1e3 * (time.perf_counter() - began))
        rate = megabytes / min(ours)
        print(f"linears {rows:3} rows: {describe(ours, others)}   {rate:5.1f} GB/s", flush=True)


def main() -> None:
    """Run what fits the models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="folders of checkpoints")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=("linears", "model"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for path in options.models:
        print(f"{path.name}, {options.threads} threads; kernels / torch ops")
        if options.only != "model":
            bench_linears(path, options.repeats)
        if options.only == "linears":
            continue
        sides = Sides.of(path)
        if sides.kernels.embedding is not None:
            bench_embedding(sides, options.repeats)
        if sides.kernels.generation is not None:
            bench_decode(sides, min(3, options.repeats))
        for side in (sides.kernels, sides.torch_ops):
            side.close()


if __name__ == "__main__":
    main()
