#!/usr/bin/env python3
"""Hold the vectors of ROSE to those of the reference libraries.

Three questions, each with a bound, and a non-zero exit code where one is broken: are the vectors
those of sentence-transformers (or of transformers itself, for a model without a recipe of its
library), are they as good at STS-B when they come over HTTP, and are they independent of what
else is in the batch?
"""

import argparse
import base64
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from rich.progress import Progress

from rose import Engine
from tools.references import Embed, embed_by_sentence_transformers, embed_by_transformers
from tools.report import MODELS, Report, add_output_options, beside
from tools.server import serve
from tools.texts import corpus_texts, cosines, mixed_texts, near_one, spearman, sts_pairs

MAX_LEN = 512
ONE_PASS = 1 << 18  # tokens: more than any batch here has, so that it runs as one forward pass
PROBES = 16
BOUND = 0.9999


@dataclass(frozen=True)
class Subject:
    """How a model is compared.

    Attributes:
        prompt: Goes before every text.
        prompt_name: The name under which the checkpoint knows it.
        sts: Rank correlation on STS-B that the checkpoint is known for, by language.
        reference: Makes the function that embeds as the reference library does.
    """

    prompt: str
    prompt_name: str | None
    sts: dict[str, float]
    reference: Callable[[Path, int], Embed]


SUBJECTS = {
    "all-MiniLM-L6-v2": Subject("", None, {"en": 0.8203}, embed_by_sentence_transformers),
    "multilingual-e5-small": Subject(
        "query: ", "query", {"en": 0.8397, "zh": 0.7825}, embed_by_transformers
    ),
}
OTHER = Subject("", None, {}, embed_by_sentence_transformers)


def compare(
    report: Report, path: Path, subject: Subject, texts: Sequence[str], progress: Progress
) -> None:
    """Compare the vectors of texts with the reference's."""
    name = path.name
    with Engine(path, device="cpu", dtype="float32", max_model_len=MAX_LEN) as engine:
        encoded = engine.encode(texts, prompt=subject.prompt, truncate=True)
        ours = engine.embed(texts, prompt=subject.prompt, truncate=True, normalize=True)
    lengths = np.array([len(ids) for ids in encoded.ids])
    embed = subject.reference(path, MAX_LEN)
    theirs = np.empty_like(ours)
    order = np.argsort(-lengths, kind="stable")
    for chunk in progress.track(np.array_split(order, -(-len(order) // 16)), description=name):
        theirs[chunk] = embed([subject.prompt + texts[i] for i in chunk])
    found = cosines(ours, theirs)
    worst = int(found.argmin())
    report.check(
        f"{name}: least cosine", near_one(found[worst]), f">= {BOUND}", found[worst] >= BOUND
    )
    report.check(
        f"{name}: mean cosine", near_one(found.mean()), f">= {BOUND}", found.mean() >= BOUND
    )
    if found[worst] < BOUND:
        print(f"the worst text: {texts[worst][:200]!r}", file=sys.stderr)
    report.table(
        f"{name}: texts",
        ["texts", "tokens, least", "median", "most", f"cut to {MAX_LEN}"],
        [[len(texts), lengths.min(), int(np.median(lengths)), lengths.max(), len(encoded.cut)]],
    )


def check_independence(
    report: Report, path: Path, subject: Subject, texts: Sequence[str], deterministic: bool
) -> None:
    """Embed some texts alone, with one other, and among 255 others."""
    with Engine(
        path,
        device="cpu",
        dtype="float32",
        max_model_len=MAX_LEN,
        max_batch_tokens=ONE_PASS,
        deterministic=deterministic,
    ) as engine:

        def embed(batch: Sequence[str]) -> np.ndarray:
            return engine.embed(batch, prompt=subject.prompt, truncate=True)

        probes, others = texts[:PROBES], texts[PROBES : PROBES + 256 - PROBES]
        alone = np.concatenate([embed([text]) for text in probes])
        pairs = zip(probes, others, strict=False)
        companies = {
            "in a batch of 2": np.concatenate([embed([other, text])[1:] for text, other in pairs]),
            f"in a batch of {PROBES + len(others)}": embed([*others, *probes])[-PROBES:],
        }
    for company, rows in companies.items():
        _check_equal(report, f"{path.name}: {company}", rows, alone, deterministic)


def _check_equal(
    report: Report, name: str, rows: np.ndarray, alone: np.ndarray, bits: bool
) -> None:
    if bits:
        same = int((rows == alone).all(axis=1).sum())
        value = f"{same} of {len(rows)} bit-equal"
        report.check(f"{name}, deterministic", value, "all bit-equal", same == len(rows))
    else:
        least = cosines(rows, alone).min()
        report.check(f"{name}, least cosine", near_one(least), ">= 0.99999", least >= 0.99999)


def check_sts(
    report: Report, path: Path, subject: Subject, data: Path, limit: int | None, progress: Progress
) -> None:
    """Rank pairs of STS-B by the vectors that a server gives."""
    sets = {lang: sts_pairs(data, lang, limit) for lang in subject.sts}
    if not any(sets.values()):
        report.notes.append(f"No STS-B at hand: {path.name} was not ranked.")
        return
    with serve([path], "--dtype", "float32") as server:
        for lang, pairs in sets.items():
            if pairs is None:
                continue
            texts = [*pairs.left, *pairs.right]
            vectors = _over_http(server.url, texts, subject.prompt_name, progress)
            half = len(pairs.left)
            rho = spearman(cosines(vectors[:half], vectors[half:]), np.array(pairs.scores))
            name = f"{path.name}: STS-B {lang} test, Spearman"
            known = subject.sts[lang]
            kept = limit is not None or abs(rho - known) < 0.0015
            bound = f"{known} within 0.0015" if limit is None else "(only a part was ranked)"
            report.check(name, f"{rho:.4f}", bound, kept)
        report.check(
            f"{path.name}: lines of trouble in the log", len(server.troubles()), "0",
            not server.troubles(),
        )  # fmt: skip


def _over_http(
    url: str, texts: Sequence[str], prompt_name: str | None, progress: Progress
) -> np.ndarray:
    rows = []
    chunks = [texts[i : i + 128] for i in range(0, len(texts), 128)]
    with httpx.Client(base_url=url, timeout=300) as http:
        for chunk in progress.track(chunks, description="STS-B over HTTP"):
            body = {"input": chunk, "encoding_format": "base64", "prompt_name": prompt_name}
            answer = http.post("/v1/embeddings", json=body).raise_for_status().json()
            rows += [base64.b64decode(item["embedding"]) for item in answer["data"]]
    return np.stack([np.frombuffer(row, "<f4") for row in rows])


def main() -> int:
    """Run the tool."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    report = Report(
        "accuracy",
        "Accuracy of the vectors",
        f"{options.texts} seeded texts of mixed length and language, with emoji and odd Unicode, "
        "in float32 against the reference library; STS-B ranked by vectors that came over HTTP; "
        "the same text alone and in company.",
    )
    extra = corpus_texts(options.data)
    texts = mixed_texts(options.texts, options.seed, extra)
    company = mixed_texts(256, options.seed + 1, extra)
    with Progress(transient=True) as progress:
        for path in options.model:
            subject = SUBJECTS.get(path.name, OTHER)
            compare(report, path, subject, texts, progress)
            for deterministic in (False, True):
                check_independence(report, path, subject, company, deterministic)
            if options.data:
                check_sts(report, path, subject, options.data, options.sts_pairs, progress)
    return report.finish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        action="append",
        help="model folder, repeatable (default: the demo embedders that are there)",
    )
    parser.add_argument("--texts", type=int, default=1000, help="texts to compare (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="other texts (default 0)")
    parser.add_argument(
        "--data", type=Path, default=beside("data"), help="folder with stsb/ and wikitext-2/"
    )
    parser.add_argument("--sts-pairs", type=int, help="rank only so many pairs (default: all)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    add_output_options(parser)
    options = parser.parse_args()
    options.model = options.model or [MODELS / n for n in SUBJECTS if (MODELS / n).is_dir()]
    if not options.model:
        parser.error("no model: give --model, or fetch the demo models with `make models`")
    return options


if __name__ == "__main__":
    sys.exit(main())
