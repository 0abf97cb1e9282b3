#!/usr/bin/env python3
"""Compare the embedding throughput of ROSE with sentence-transformers and with the machine.

Texts in, vectors out, on the same weights, cores and texts: ROSE, sentence-transformers at its
default batch size and at others, and the matrix products of the model's shapes take turns in one
run, so that whatever else the machine does meets them alike. The vectors are compared first.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress

from rose import Engine
from rose.kernels.cpu.gemm import PackedMatrix
from rose.kernels.cpu.library import load_library
from tools.references import linear_shapes, sentence_transformer
from tools.report import MODELS, Report, add_output_options, beside, cores
from tools.texts import cosines, near_one, skewed_lengths, text_of_tokens

MAX_LEN = 512
BATCH_SIZES = (32, 16, 8)  # the first is the default of sentence-transformers
GEMM_ROWS = (512, 2048)
GEMM_SECONDS = 0.1  # spent on each shape in each turn


@dataclass(frozen=True)
class Contender:
    """One way to the vectors: a name, and a function that does the work once."""

    name: str
    run: Callable[[], np.ndarray]


class GemmLimit:
    """The fastest matrix product of torch's and of ROSE's, as operations a second."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Measure `shapes`, (inputs, outputs) of the linear layers, those of a kind once."""
        self.flops_per_token = sum(2 * inputs * outputs for inputs, outputs in shapes)
        library = load_library()
        self._products: list[tuple[int, Callable[[], object]]] = []
        for inputs, outputs in sorted(set(shapes)):
            weight = torch.randn(outputs, inputs)
            packed = PackedMatrix(library, weight) if library else None
            for rows in GEMM_ROWS:
                x, y = torch.randn(rows, inputs), torch.empty(rows, outputs)
                flops = 2 * rows * inputs * outputs
                self._products.append((flops, partial(torch.mm, x, weight.T.contiguous(), out=y)))
                if packed is not None:
                    self._products.append((flops, partial(packed, x)))

    def measure(self) -> float:
        """Return floating-point operations a second of the best product, right now."""
        return max(flops / self._seconds(product) for flops, product in self._products)

    def _seconds(self, product: Callable[[], object]) -> float:
        times = []
        end = time.perf_counter() + GEMM_SECONDS
        while time.perf_counter() < end or len(times) < 3:
            began = time.perf_counter()
            product()
            times.append(time.perf_counter() - began)
        return float(np.median(times))


def load_texts(options: argparse.Namespace, tokens_of: Callable[[str], int]) -> list[str]:
    """Read the texts, or draw them."""
    if options.data:
        items = json.loads(options.data.read_text())["items"]
        return [item["text"] for item in items][: options.texts]
    rng = np.random.default_rng(options.seed)
    lengths = skewed_lengths(options.texts, options.seed)
    return [text_of_tokens(rng, length, tokens_of) for length in lengths]


def check_vectors(report: Report, contenders: Sequence[Contender]) -> bool:
    """Warm everything up, and compare its vectors with the first contender's."""
    first, *others = [contender.run() for contender in contenders]
    least = min(float(cosines(first, rows).min()) for rows in others)
    report.check(
        "least cosine to sentence-transformers", near_one(least), ">= 0.999", least > 0.999
    )
    return least > 0.999


def take_turns(
    contenders: Sequence[Contender], limit: GemmLimit, repeats: int, progress: Progress
) -> tuple[dict[str, list[float]], list[float]]:
    """Run each once a turn; returns the seconds of each by name, and the limit's rates."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    rates = []
    for turn in progress.track(range(repeats), description="turns"):
        rates.append(limit.measure())
        order = contenders if turn % 2 else contenders[::-1]
        for contender in order:
            began = time.perf_counter()
            contender.run()
            seconds[contender.name].append(time.perf_counter() - began)
    return seconds, rates


def contenders_of(engine: Engine, path: Path, texts: Sequence[str]) -> list[Contender]:
    """ROSE first, then sentence-transformers, its default first."""
    peer = sentence_transformer(path, MAX_LEN)

    def peer_run(size: int) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(
            peer.encode(list(texts), batch_size=size, normalize_embeddings=True)
        )

    encoded = engine.encode(texts, truncate=True)
    return [
        Contender("ROSE", lambda: engine.embed(texts, truncate=True, normalize=True)),
        Contender("ROSE, from token ids", lambda: engine.embed_encoded(encoded, normalize=True)),
        *(Contender(_peer_name(size), peer_run(size)) for size in BATCH_SIZES),
    ]


def _peer_name(size: int) -> str:
    default = " (default)" if size == BATCH_SIZES[0] else ""
    return f"sentence-transformers, batches of {size}{default}"


def summarise(
    report: Report,
    seconds: dict[str, list[float]],
    rates: Sequence[float],
    flops: int,
    texts: int,
    tokens: int,
) -> None:
    """Turn seconds into the table and the bounds."""
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    peers = {name: m for name, m in medians.items() if not name.startswith("ROSE")}
    best = min(peers, key=peers.__getitem__)
    rate = max(rates)
    floor = tokens * flops / rate
    rows = [
        [
            name,
            f"{median:.2f}",
            f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}",
            f"{texts / median:.1f}",
            f"{tokens / median:.0f}",
            f"{floor / median:.0%}",
        ]
        for name, median in medians.items()
    ]
    columns = ["engine", "s, median", "s, range", "texts/s", "tokens/s", "of the GEMM limit"]
    report.table(f"{texts} texts of {tokens} tokens, {len(rates)} turns", columns, rows)
    for label, peer in (("its default", _peer_name(BATCH_SIZES[0])), ("its best", best)):
        turns = np.array(seconds[peer]) / np.array(seconds["ROSE"])
        ratio = peers[peer] / medians["ROSE"]
        value = f"{ratio:.2f} (turns {turns.min():.2f} to {turns.max():.2f})"
        report.check(f"ROSE against sentence-transformers at {label}", value, "> 1.0", ratio > 1)
    report.notes.append(
        f"GEMM limit: the model's linear layers take {flops / 1e6:.1f} MFLOP a token, and the "
        f"fastest of their matrix products ran at {rate / 1e9:.0f} GFLOP/s in its best turn "
        f"({np.median(rates) / 1e9:.0f} in the median), so {floor:.2f} s is the least that "
        "the linear layers can take. Attention and everything else are not in the limit."
    )
    report.data = {"seconds": seconds, "gemm_flops": list(rates), "tokens": tokens}


def main() -> int:
    """Run the tool."""
    options = _options()
    torch.set_num_threads(options.threads)
    report = Report(
        "throughput",
        "Embedding throughput",
        f"Texts of mixed length in float32 on {options.threads} threads, tokenisation included "
        "unless it says otherwise: ROSE in process against sentence-transformers (which sorts "
        "by length itself) and against the machine's matrix products, in turns.",
    )
    with (
        Progress(transient=True) as progress,
        Engine(options.model, device="cpu", dtype="float32", max_model_len=MAX_LEN) as engine,
    ):
        texts = load_texts(options, lambda text: engine.encode(text, truncate=True).tokens)
        contenders = contenders_of(engine, options.model, texts)
        if check_vectors(report, contenders):
            limit = GemmLimit(linear_shapes(sentence_transformer(options.model, MAX_LEN)))
            seconds, rates = take_turns(contenders, limit, options.repeats, progress)
            tokens = engine.encode(texts, truncate=True).tokens
            summarise(report, seconds, rates, limit.flops_per_token, len(texts), tokens)
    return report.finish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODELS / "all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7, help="turns (default 7)")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data",
        type=Path,
        default=beside("bench", "mixed256.json"),
        help='JSON with {"items": [{"text": ...}]} (default: drawn, or shared data if there)',
    )
    add_output_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
