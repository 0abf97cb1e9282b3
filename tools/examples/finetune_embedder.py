#!/usr/bin/env python3
"""Make an embedder of a causal LLM, and serve it on the same day.

What it does, in order:
  1. puts pooling and normalisation behind the LLM, as sentence-transformers writes them;
  2. trains it on pairs of sentences that mean the same: in a batch, each sentence has to find its
     partner among all the others (MultipleNegativesRankingLoss);
  3. saves a folder of sentence-transformers, and lets `rose inspect` say what it reads there;
  4. serves the folder with `rose serve`, and compares the vectors that come over HTTP with those
     of sentence-transformers itself.

The pairs are those of STS-B (--data, a folder with stsb/stsb-en-dev.csv and stsb-en-test.csv), or,
without it, made up: enough to see that it learns. Ranks are measured on pairs that it never saw.

To train on pairs of your own, replace `training_pairs`: it returns a list of pairs of texts.
"""

import argparse
import csv
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import httpx
import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import processors

from tools.report import MODELS
from tools.server import serve
from tools.texts import SentencePairs, cosines, near_one, spearman, sts_pairs

Pair = tuple[str, str]

BOUND = 0.9999  # least cosine of a served vector to sentence-transformers' own
MAX_TOKENS = 512
HELD_OUT = 128
STS_PAIRS = 500  # of the test set, drawn at random: the whole of it takes longer than the training
SAME = 4.0  # of STS-B's scores, 0 to 5: from here on two sentences mean the same

# Two ways to say the same, of each part of a sentence. A made-up pair takes one for either side.
WORDS = {
    "who": "a man|a guy, a woman|a lady, the child|the kid, my doctor|my physician, "
    "a thief|a robber, the teacher|the instructor, an old farmer|an aged peasant, "
    "the boss|the manager",
    "does": "buys|purchases, repairs|fixes, hides|conceals, throws away|discards, "
    "looks at|watches, carries|transports, paints|colours, cuts|slices, cleans|washes, "
    "breaks|smashes",
    "what": "a car|an automobile, the bread|the loaf, a big rock|a large stone, "
    "two pictures|two images, a present|a gift, the sofa|the couch, some meat|some beef, "
    "the window|the glass pane",
    "when": "in the evening|at nightfall, every day|daily, very quickly|in a hurry, "
    "near the shop|by the store, at home|in the house, in the forest|in the woods, "
    "silently|without a sound",
}
FORMS = ("{who} {does} {what} {when}.", "{when} {who} {does} {what}.")


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Make up pairs of sentences that say the same in other words, no two pairs alike."""
    rng = random.Random(seed)
    found: dict[tuple[str, ...], Pair] = {}
    while len(found) < count:
        meaning = {part: rng.choice(words.split(", ")) for part, words in WORDS.items()}
        left, right = (
            form.format(**{part: words.split("|")[side] for part, words in meaning.items()})
            for side, form in enumerate(rng.sample(FORMS, 2))
        )
        found[tuple(meaning.values())] = (left.capitalize(), right.capitalize())
    return list(found.values())


def training_pairs(data: Path | None, seed: int) -> list[Pair]:
    """The pairs to learn from: those of STS-B's dev set that mean the same, or made-up ones."""
    if data is None:
        return make_pairs(2000 + HELD_OUT, seed)[HELD_OUT:]
    with (data / "stsb" / "stsb-en-dev.csv").open(newline="", encoding="utf-8") as file:
        return [(left, right) for left, right, score in csv.reader(file) if float(score) >= SAME]


def build(llm: Path, pooling: str) -> SentenceTransformer:
    """Put pooling and normalisation behind an LLM, in float32: bfloat16 forgets small steps."""
    core = Transformer(str(llm), model_kwargs={"dtype": torch.float32}, max_seq_length=MAX_TOKENS)
    if pooling == "lasttoken":
        _end_texts(core)
    modules = [core, Pooling(core.get_embedding_dimension(), pooling), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


def _end_texts(core: Transformer) -> None:
    """Let the tokenizer end each text with the end token: one place where all has been read."""
    end, end_id = core.tokenizer.eos_token, core.tokenizer.eos_token_id
    core.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, end_id)]
    )


def batches(pairs: list[Pair], size: int, seed: int) -> Iterator[list[Pair]]:
    """Batches without end; each pass over the pairs is in another order, and sides change."""
    rng = random.Random(seed)
    while True:
        rng.shuffle(pairs)
        for start in range(0, max(1, len(pairs) - size + 1), size):
            chunk = pairs[start : start + size]
            yield [pair if rng.random() < 0.5 else pair[::-1] for pair in chunk]


def train(
    model: SentenceTransformer, pairs: list[Pair], options: argparse.Namespace
) -> list[float]:
    """Train for some steps; returns the loss of each."""
    loss_of = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    warmup = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (options.steps - step) / options.steps)
    )
    losses: list[float] = []
    model.train()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=options.steps)
        drawn = batches(pairs, options.batch_size, options.seed)
        for batch in islice(drawn, options.steps):
            sides = [model.preprocess([pair[side] for pair in batch]) for side in (0, 1)]
            loss = loss_of(sides, torch.arange(len(batch)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"training, loss {losses[-1]:.3f}")
    model.eval()
    return losses


@dataclass(frozen=True)
class Quality:
    """How good vectors are.

    Attributes:
        found: Share of held-out made-up sentences whose nearest neighbour is their partner.
        sts: Rank correlation of cosines with people's scores on `STS_PAIRS` pairs of STS-B.
    """

    found: float
    sts: float | None

    def __str__(self) -> str:
        sts = "" if self.sts is None else f", STS-B Spearman {self.sts:.4f}"
        return f"partner found {self.found:.1%}{sts}"


def sts_sample(data: Path | None, seed: int) -> SentencePairs | None:
    """Some pairs of STS-B's test set, if it is there."""
    whole = sts_pairs(data, "en") if data else None
    if whole is None:
        return None
    size = len(whole.scores)
    chosen = random.Random(seed).sample(range(size), min(size, STS_PAIRS))
    parts = ([part[i] for i in chosen] for part in (whole.left, whole.right))
    return SentencePairs(*parts, [whole.scores[i] for i in chosen])


def test_sentences(sts: SentencePairs | None, seed: int) -> list[str]:
    """Held-out sentences: left sides, then right sides, of the made-up pairs and of STS-B."""
    pairs = make_pairs(2000 + HELD_OUT, seed)[:HELD_OUT]
    left, right = zip(*pairs, strict=True)
    return [*left, *right, *(sts.left + sts.right if sts else [])]


def quality(vectors: np.ndarray, sts: SentencePairs | None) -> Quality:
    """Judge the vectors of `test_sentences`."""
    left, right = vectors[:HELD_OUT], vectors[HELD_OUT : 2 * HELD_OUT]
    found = float(((left @ right.T).argmax(1) == np.arange(HELD_OUT)).mean())
    if sts is None:
        return Quality(found, None)
    a, b = np.split(vectors[2 * HELD_OUT :], 2)
    return Quality(found, spearman(cosines(a, b), np.array(sts.scores)))


def served_vectors(folder: Path, texts: list[str]) -> np.ndarray:
    """Embed texts with `rose serve`, over HTTP."""
    rows: list[list[float]] = []
    with serve([folder]) as server, httpx.Client(base_url=server.url, timeout=300) as http:
        for start in range(0, len(texts), 256):
            body = {"model": folder.name, "input": texts[start : start + 256]}
            answer = http.post("/v1/embeddings", json=body).raise_for_status().json()
            rows += [item["embedding"] for item in answer["data"]]
    return np.array(rows, np.float32)


def say(line: str) -> None:
    """Print a line at once, also into a file."""
    print(line, flush=True)


def main() -> int:
    """Run the example."""
    options = _options()
    torch.manual_seed(options.seed)
    sts = sts_sample(options.data, options.seed)
    texts = test_sentences(sts, options.seed)
    model = build(options.model, options.pooling)
    say(f"before: {quality(model.encode(texts), sts)}")
    pairs = training_pairs(options.data, options.seed)
    say(f"training on {len(pairs)} pairs, {options.steps} steps of {options.batch_size}")
    began = time.perf_counter()
    losses = train(model, pairs, options)
    say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {time.perf_counter() - began:.0f} s")
    own = model.encode(texts)
    say(f"after: {quality(own, sts)}")
    model.save(str(options.out), create_model_card=False)
    subprocess.run([sys.executable, "-m", "rose", "inspect", str(options.out)], check=True)
    served = served_vectors(options.out, texts)
    least = cosines(own, served).min()
    say(f"served by ROSE: {quality(served, sts)}")
    say(f"least cosine to sentence-transformers over {len(texts)} texts: {near_one(least)}")
    say(f"serve it: rose serve {options.out}")
    return 0 if least >= BOUND else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=MODELS / "SmolLM2-135M-Instruct",
        help="folder of a causal LLM (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=MODELS / "SmolLM2-135M-embedder",
        help="folder to write (default: %(default)s)",
    )
    parser.add_argument("--data", type=Path, help="folder with stsb/; without it pairs are made up")
    parser.add_argument("--pooling", choices=("mean", "lasttoken"), default="mean",
                        help="what becomes the vector: the mean over the tokens, or an end token "
                        "that is added (default: %(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=30, help="of training (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs (default: %(default)s)")
    parser.add_argument(
        "--learning-rate", type=float, default=1e-4, help="at its highest (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="another run (default: %(default)s)")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"--model: {options.model} holds no model; `make models` fetches one")
    needed = ("stsb-en-dev.csv", "stsb-en-test.csv")
    if options.data and not all((options.data / "stsb" / name).is_file() for name in needed):
        parser.error(f"--data: {options.data / 'stsb'} is to hold {' and '.join(needed)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
