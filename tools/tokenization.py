#!/usr/bin/env python3
"""What tokenisation costs: WordPiece, BPE and Unigram, alone and as the gateway does it.

Unigram is this project's own code, so its ids are compared with the library's on many odd texts,
with the model's normaliser and with those of other models of the same vocabulary.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from rose.models.config import CheckpointFolder
from rose.models.tokenizer import read_tokenizer_card, read_tokenizer_json
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.gateway.unigram.checked import fast_encoder
from tools.charsmap import compile_charsmap, nmt_nfkc_rules
from tools.odd_texts import every_character, long_texts, odd_texts
from tools.report import MODELS, Report, add_output_options
from tools.texts import mixed_texts, text_of_tokens

KINDS = {
    "WordPiece": "all-MiniLM-L6-v2",
    "BPE": "SmolLM2-135M-Instruct",
    "Unigram": "multilingual-e5-small",
}
BATCH = 64
CHECKED = 2000  # texts whose ids are compared with the library's


def load(folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """The gateway's tokenizer of a model, and the library's own with its offsets."""
    files = CheckpointFolder(folder)
    data = read_tokenizer_json(files)
    plain = tokenizers.Tokenizer.from_buffer(data)
    plain.no_truncation()
    plain.no_padding()
    facts = read_tokenizer_card(files)
    return Tokenizer(tokenizers.Tokenizer.from_buffer(data), facts), plain


def median_us(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median microseconds of each call, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: 1e6 * float(np.median(times)) for name, times in taken.items()}


def measure(
    kind: str, folder: Path, options: argparse.Namespace, report: Report
) -> list[list[str]]:
    """Rows of the table of one tokenizer."""
    ours, plain = load(folder)
    texts = mixed_texts(CHECKED, options.seed)
    expected = [encoding.ids for encoding in plain.encode_batch(texts)]
    wrong = sum(a.tolist() != b for a, b in zip(ours.encode(texts), expected, strict=True))
    report.check(
        f"{kind}: texts with other ids than the library's, of {CHECKED}", wrong, "0", not wrong
    )
    rng = np.random.default_rng(options.seed)
    rows = []
    for tokens in options.tokens:
        text = text_of_tokens(rng, tokens, lambda text: len(plain.encode(text).ids))
        many = [text] * BATCH
        found = median_us(
            {
                "library": lambda text=text: plain.encode(text).ids,
                "gateway": lambda text=text: ours.encode([text]),
                "batch": lambda many=many: ours.encode(many),
            },
            options.turns,
        )
        row = [found["library"], found["gateway"], found["batch"] / BATCH]
        rows.append([kind, str(tokens), *(f"{value:,.0f}" for value in row)])
    return rows


def unigram_variants(plain: tokenizers.Tokenizer) -> Iterator[tuple[str, tokenizers.Tokenizer]]:
    """The tokenizer, and its vocabulary behind what other models put before it."""
    yield "as it is", plain
    charsmap = normalizers.Precompiled(compile_charsmap(nmt_nfkc_rules()))
    plain.normalizer = charsmap
    parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    plain.pre_tokenizer = pre_tokenizers.Sequence(parts)
    yield "XLM-R's parts", plain
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    plain.normalizer = normalizers.Sequence([charsmap, spaces])
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    yield "BGE-M3's parts", plain


def unigram_texts(count: int, seed: int) -> Iterator[list[str]]:
    """`count` texts in groups, a quarter of them in words, and some of a megabyte."""
    yield long_texts()
    every = iter(every_character())
    for start in range(0, count, 2000):
        odd = odd_texts(1000, seed + start)
        characters = list(islice(every, 500))
        yield [*mixed_texts(500, seed + start, most_words=200), *odd, *characters][:2000]


def check_unigram(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Compare the ids of odd texts with the library's, for each variant."""
    rows = []
    for name, plain in unigram_variants(load(folder)[1]):
        start = time.perf_counter()
        encoder = fast_encoder(plain)
        taken = time.perf_counter() - start
        report.check(f"Unigram, {name}: in C++", encoder is not None, "True", encoder is not None)
        if encoder is None:
            continue
        wrong = left = seen = 0
        for special, texts in enumerate(unigram_texts(options.unigram_texts, options.seed)):
            rows_of_ids = encoder.encode(texts, special=special % 2 == 0)
            expected = plain.encode_batch_fast(texts, add_special_tokens=special % 2 == 0)
            for ids, encoding in zip(rows_of_ids, expected, strict=True):
                left += ids is None
                wrong += ids is not None and ids.tolist() != encoding.ids
            seen += len(texts)
        report.check(f"Unigram, {name}: texts with other ids, of {seen:,}", wrong, "0", not wrong)
        cells = (
            f"{seen:,}",
            str(wrong),
            f"{left:,}",
            f"{taken:.2f}",
            f"{encoder.num_bytes / 1e6:.0f}",
        )
        rows.append([name, *cells])
    columns = ["normaliser and words", "odd texts", "other ids", "left to the library"]
    report.table("Unigram against the library", [*columns, "seconds to load", "trie, MB"], rows)


def main() -> int:
    """Run the tool."""
    options = _options()
    report = Report(
        "tokenization",
        "Tokenisation",
        f"Microseconds a text: the `tokenizers` library's `encode` with offsets, the gateway's way "
        f"(no offsets, ids as int32) for one text, and for {BATCH} at once on all cores. Median of "
        f"{options.turns} turns.",
    )
    rows: list[list[str]] = []
    for kind, name in KINDS.items():
        if (folder := options.models / name).exists():
            rows += measure(kind, folder, options, report)
            if kind == "Unigram" and options.unigram_texts:
                check_unigram(folder, options, report)
    columns = ["kind", "tokens", "library, one", "gateway, one", f"gateway, {BATCH} at once"]
    report.table("microseconds a text", columns, rows)
    report.data["rows"] = rows
    return report.finish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the models' folders")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 512, 4096])
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--unigram-texts", type=int, default=100_000, help="odd texts to compare")
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
