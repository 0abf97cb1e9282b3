#!/usr/bin/env python3
"""Hold a quantised model to the same model in float32: what it loses, and what it gains.

An embedder: cosines of texts of mixed length, STS-B, and texts a second. A language model:
perplexity of wikitext, greedy tokens, and tokens a second. Models take turns in one process. In 4
bits a Llama is measured with its channels in another order too: `tools.shuffled` says why.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rose import Engine, SamplingParams
from tools.report import MODELS, Report, Table, add_output_options, beside, cores
from tools.shuffled import shuffle_channels
from tools.texts import corpus_texts, cosines, mixed_texts, near_one, spearman, sts_pairs

MAX_LEN = 512
LEAST_COSINE, MOST_POINTS_LOST = 0.999, 0.2
SPEED_TEXTS = 64  # of the mixed ones
WINDOW = 256  # tokens of a piece of wikitext
PROMPT, NEW = 48, 48  # tokens
STREAMS = (1, 8)
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": MAX_LEN}
# What perplexity may become, and how many first tokens must be equal, as shares.
BOUNDS = {"int8": (1.02, 0.5), "int4": (1.1, 0.1)}


@dataclass(frozen=True)
class Sides:
    """A model as it is, and rounded."""

    path: Path
    quantization: str
    plain: Engine
    rounded: Engine

    @property
    def name(self) -> str:
        """The model's."""
        return self.path.name

    @property
    def both(self) -> tuple[Engine, Engine]:
        """First the one as it is."""
        return self.plain, self.rounded


@dataclass(frozen=True)
class Summary:
    """Rows of the tables that stand first: of embedders, and of language models."""

    embedders: list[list[str]] = field(default_factory=list)
    models: list[list[str]] = field(default_factory=list)

    def tables(self) -> list[Table]:
        """Those that have rows."""
        columns = ["model", "weights", "least cosine", "mean cosine", "STS-B, points (change)"]
        found = [Table("Embedders", [*columns, "times as fast"], self.embedders)]
        columns = ["model", "weights", "perplexity in float32", "rounded", "change", "shuffled"]
        columns += [f"times as fast, {n} stream{'s' * (n > 1)}" for n in STREAMS]
        found.append(Table("Language models", columns, self.models))
        return [table for table in found if table.rows]


def take_turns(sides: Sides, run: Callable[[Engine], float], turns: int) -> tuple[float, float]:
    """Let both run; returns the median of what they return."""
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for index in (0, 1) if turn % 2 else (1, 0):
            value = run(sides.both[index])
            if turn:
                found[index].append(value)
    return float(np.median(found[0])), float(np.median(found[1]))


def compare_vectors(
    report: Report, sides: Sides, options: argparse.Namespace, summary: "Summary"
) -> None:
    """Compare vectors, STS-B and speed."""
    label = f"{sides.name}, {sides.quantization}"
    texts = mixed_texts(options.texts, options.seed, corpus_texts(options.data))
    exact, found = (e.embed(texts, truncate=True, normalize=True) for e in sides.both)
    near = cosines(exact, found)
    least, mean = float(near.min()), float(near.mean())
    name = f"{label}: least cosine of {len(texts)} texts"
    report.check(name, near_one(least), f">= {LEAST_COSINE}", least >= LEAST_COSINE)
    report.check(f"{label}: mean cosine", near_one(mean), f">= {LEAST_COSINE}", mean >= 0.999)
    value = ""
    if pairs := sts_pairs(options.data, "en", options.sts_pairs):
        before, after = (_points(e, pairs.left, pairs.right, pairs.scores) for e in sides.both)
        value = f"{after:.2f} ({after - before:+.2f})"
        kept = before - after <= MOST_POINTS_LOST
        name = f"{label}: STS-B of {len(pairs.left)} pairs, points (beside float32)"
        report.check(name, value, f"-{MOST_POINTS_LOST} at most", kept)
    faster = _compare_texts_a_second(report, sides, texts, options.turns)
    row = [sides.name, sides.quantization, f"{least:.5f}", f"{mean:.5f}", value, f"{faster:.2f}"]
    summary.embedders.append(row)


def _points(
    engine: Engine, left: Sequence[str], right: Sequence[str], scores: Sequence[float]
) -> float:
    """Return 100 times the rank correlation of cosines with what people said."""
    vectors = engine.embed([*left, *right], truncate=True)
    return 100 * spearman(cosines(vectors[: len(left)], vectors[len(left) :]), np.array(scores))


def _compare_texts_a_second(
    report: Report, sides: Sides, texts: Sequence[str], turns: int
) -> float:
    """Compare speed; returns how many times as fast mixed texts are."""
    loads = {
        "1 x 16 tokens": [[7] * 16],
        "1 x 128 tokens": [[7] * 128],
        "1 x 512 tokens": [[7] * 512],
        f"{len(texts[:SPEED_TEXTS])} mixed texts": list(texts[:SPEED_TEXTS]),
    }
    rows, faster = [], 0.0
    for name, load in loads.items():

        def run(engine: Engine, load: Sequence[str] | Sequence[list[int]] = load) -> float:
            began = time.perf_counter()
            engine.embed(load, truncate=True)
            return time.perf_counter() - began

        plain, rounded = take_turns(sides, run, turns)
        faster = plain / rounded
        rows.append([name, f"{1e3 * plain:.2f}", f"{1e3 * rounded:.2f}", f"{faster:.2f}"])
    columns = ["load", "float32, ms", f"{sides.quantization}, ms", "times as fast"]
    report.table(f"{sides.name}: speed, median of {turns} turns", columns, rows)
    return faster


def compare_texts(
    report: Report, sides: Sides, options: argparse.Namespace, summary: "Summary"
) -> None:
    """Compare perplexity, greedy tokens and speed."""
    label = f"{sides.name}, {sides.quantization}"
    most, least_same = BOUNDS[sides.quantization]
    pieces = _pieces(sides.plain, options)
    before, after = (perplexity(engine, pieces) for engine in sides.both)
    value = f"{after:.2f} (float32 {before:.2f}, x {after / before:.3f})"
    tokens = sum(map(len, pieces))
    report.check(
        f"{label}: perplexity of {tokens} tokens", value, f"x <= {most}", after / before <= most
    )
    prompts = [piece[:PROMPT] for piece in pieces[: options.prompts]]
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    runs = [[c.token_ids for c in e.generate(prompts, params)] for e in sides.both]
    shares = [_same(one, other) / NEW for one, other in zip(*runs, strict=True)]
    value = f"{np.mean(shares):.0%} of {NEW} tokens before the first that differs"
    name = f"{label}: greedy tokens of {len(prompts)} prompts"
    report.check(name, value, f">= {least_same:.0%}", float(np.mean(shares)) >= least_same)
    faster = _compare_tokens_a_second(report, sides, prompts, options.turns)
    shuffled = ""
    if sides.quantization == "int4":
        shuffled = f"x {_shuffled_perplexity(sides, options, pieces) / before:.3f}"
        name = f"{label}: perplexity with channels in another order"
        report.check(name, shuffled, f"x <= {most}", float(shuffled[2:]) <= most)
    change = f"x {after / before:.3f}"
    row = [sides.name, sides.quantization, f"{before:.2f}", f"{after:.2f}", change, shuffled]
    summary.models.append([*row, *(f"{times:.2f}" for times in faster)])


def _shuffled_perplexity(
    sides: Sides, options: argparse.Namespace, pieces: Sequence[list[int]]
) -> float:
    """Return the perplexity of the rounded model whose channels have changed places."""
    with tempfile.TemporaryDirectory() as folder:
        path = shuffle_channels(sides.path, Path(folder) / "shuffled", options.seed)
        with Engine(path, quantization=sides.quantization, **ENGINE) as engine:
            return perplexity(engine, pieces)


def perplexity(engine: Engine, pieces: Sequence[list[int]]) -> float:
    """Return e to the mean loss over all tokens but the first of each piece."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = [
        entry.logprob
        for completion in engine.generate(pieces, params)
        for entry in completion.prompt_logprobs or ()
    ]
    return math.exp(-sum(found) / len(found))


def _pieces(engine: Engine, options: argparse.Namespace) -> list[list[int]]:
    """Cut wikitext into pieces of one length."""
    text = (options.data / "wikitext-2" / "test.txt").read_text(encoding="utf-8")[:400_000]
    ids = engine.tokenizer.encode([text], add_special_tokens=False)[0].tolist()
    count = min(options.pieces, len(ids) // WINDOW)
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(count)]


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens before the first that differs."""
    pairs = zip(one, other, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))


def _compare_tokens_a_second(
    report: Report, sides: Sides, prompts: Sequence[list[int]], turns: int
) -> list[float]:
    """Compare speed; returns how many times as fast the numbers of `STREAMS` are."""
    rows, faster = [], []
    for streams in STREAMS:
        chosen = [prompts[i % len(prompts)][:8] for i in range(streams)]

        def run(engine: Engine, chosen: Sequence[list[int]] = chosen) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
            began = time.perf_counter()
            engine.generate(chosen, params)
            return len(chosen) * NEW / (time.perf_counter() - began)

        plain, rounded = take_turns(sides, run, turns)
        faster.append(rounded / plain)
        rows.append([streams, f"{plain:.1f}", f"{rounded:.1f}", f"{rounded / plain:.2f}"])
    columns = ["streams", "float32, tokens/s", f"{sides.quantization}, tokens/s", "times as fast"]
    report.table(f"{sides.name}: speed, median of {turns} turns", columns, rows)
    return faster


def main() -> int:
    """Run the tool."""
    options = _options()
    torch.set_num_threads(options.threads)
    report = Report(
        "quantization",
        "Quantised models",
        "Weights of 8 or 4 bits beside float32 in one process, in turns: what they lose and gain. "
        "An embedder is asked for vectors, a language model for the probabilities of wikitext and "
        "for greedy tokens.",
    )
    summary = Summary()
    for path in options.model:
        for quantization in options.quantization:
            _compare(report, path, quantization, options, summary)
    report.tables[:0] = summary.tables()
    return report.finish(options)


def _compare(
    report: Report, path: Path, quantization: str, options: argparse.Namespace, summary: Summary
) -> None:
    with Engine(path, **ENGINE) as plain:
        try:
            rounded = Engine(path, quantization=quantization, **ENGINE)
        except ValueError as error:  # what ROSE does not offer is not measured
            report.notes.append(f"{path.name}, {quantization}: {error}")
            return
        with rounded:
            sides = Sides(path, quantization, plain, rounded)
            if "embed" in plain.card.tasks:
                compare_vectors(report, sides, options, summary)
            else:
                compare_texts(report, sides, options, summary)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, action="append", help="folder, repeatable")
    parser.add_argument("--quantization", action="append", choices=sorted(BOUNDS))
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--pieces", type=int, default=12, help=f"of {WINDOW} tokens of wikitext")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--sts-pairs", type=int, help="rank only so many pairs (default: all)")
    parser.add_argument("--data", type=Path, default=beside("data"))
    add_output_options(parser)
    options = parser.parse_args()
    if options.data is None:
        parser.error("no texts: give --data, a folder with stsb/ and wikitext-2/")
    names = ("all-MiniLM-L6-v2", "multilingual-e5-small", "SmolLM2-135M-Instruct")
    options.model = options.model or [MODELS / n for n in names if (MODELS / n).is_dir()]
    options.quantization = options.quantization or ["int8", "int4"]
    return options


if __name__ == "__main__":
    sys.exit(main())
