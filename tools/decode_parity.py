#!/usr/bin/env python3
"""Hold what ROSE decodes to transformers, token for token, in every way that it can be decoded.

Greedy tokens have to equal those of transformers in float32. Where transformers' own two largest
logits are closer than 1e-4, rounding decides: such a place excuses what comes after it, and is
counted. Tokens that are drawn by a seed have to be the same in all settings.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.progress import Progress

from rose.runtime.build import PAGE_SIZE
from rose.runtime.generation import GenerationLoop, GenerationStats
from tools.decoding import (
    Continuation,
    Ids,
    Verdict,
    bytes_of_pages,
    decode_loop,
    draw_prompts,
    greedy,
    reference_greedy,
    run,
    seeded,
)
from tools.references import causal_lm
from tools.report import MODELS, Report, add_output_options, beside
from tools.texts import corpus_texts

MOVING = ("steps", "prefix_hit_tokens", "preemptions")  # counters that tell what a run did
SEEDED = 16  # outputs that are drawn by a seed
LENGTHS = (5, 17, 33, 64, 150)  # tokens of prompts: within a page, just past one, and long
TINY = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


@dataclass(frozen=True)
class Setting:
    """A way to decode.

    Attributes:
        options: Of the model.
        again: Decode a second time in the same loop, and judge that.
        needs: A counter of `GenerationStats` that has to move, or the setting tested nothing.
    """

    name: str
    options: dict[str, Any]
    again: bool = False
    needs: str | None = None


@dataclass(frozen=True)
class Work:
    """A model's prompts, and what transformers makes of them."""

    path: Path
    prompts: list[Ids]
    new: int
    expected: list[Continuation]


@dataclass(frozen=True)
class Found:
    """What a setting decoded."""

    greedy: list[Ids]
    seeded: list[Ids]
    moved: dict[str, int]
    seconds: float


def settings_for(work: Work) -> list[Setting]:
    """Every way to decode; the first is the plainest."""
    longest = max(map(len, work.prompts)) + work.new
    few_pages = 1 + -(-longest // PAGE_SIZE) * 5 // 4
    small = bytes_of_pages(work.path, few_pages)
    room = bytes_of_pages(work.path, 3 * len(work.prompts) * -(-longest // PAGE_SIZE))
    return [
        Setting("one at a time", {"max_num_seqs": 1, "kv_cache_memory": room}),
        Setting(
            "prefix cache hit, 8 at a time",
            {"max_num_seqs": 8, "kv_cache_memory": room},
            again=True,
            needs="prefix_hit_tokens",
        ),
        Setting(
            "prefill in chunks of 16, 8 at a time",
            {"max_num_seqs": 8, "max_batch_tokens": 16, "kv_cache_memory": room},
        ),
        Setting(
            f"a pool of {few_pages - 1} pages, 16 at a time",
            {"max_num_seqs": 16, "kv_cache_memory": small},
            needs="preemptions",
        ),
        Setting("16 neighbours", {"max_num_seqs": 17, "kv_cache_memory": room}),
    ]


def decode(work: Work, setting: Setting) -> Found:
    """Decode all prompts, greedily and by seeds, in one setting."""
    count = len(work.prompts)
    jobs = [(prompt, greedy(work.new)) for prompt in work.prompts]
    jobs += [(prompt, seeded(work.new, i)) for i, prompt in enumerate(work.prompts[:SEEDED])]
    order = np.random.default_rng(0).permutation(len(jobs)).tolist()

    def once(loop: GenerationLoop) -> list[Ids]:
        found = run(loop, *zip(*[jobs[i] for i in order], strict=True))
        return [tokens for _, tokens in sorted(zip(order, found, strict=True))]

    with decode_loop(work.path, max_model_len=1024, **setting.options) as loop:
        if setting.again:
            once(loop)
        before, began = loop.stats(), time.perf_counter()
        tokens = once(loop)
        seconds = time.perf_counter() - began
        moved = _moved(before, loop.stats())
        assert loop.stats().kv_pages_used == 0
    return Found(tokens[:count], tokens[count:], moved, seconds)


def _moved(before: GenerationStats, after: GenerationStats) -> dict[str, int]:
    return {name: getattr(after, name) - getattr(before, name) for name in MOVING}


def judge(report: Report, name: str, work: Work, found: Sequence[tuple[Setting, Found]]) -> None:
    """Compare what the settings decoded with transformers and with one another."""
    plain = found[0][1].seeded
    rows, wrong, differ = [], 0, 0
    for setting, result in found:
        verdict = Verdict.of(result.greedy, work.expected)
        others = sum(a != b for a, b in zip(result.seeded, plain, strict=True))
        wrong, differ = wrong + verdict.wrong, differ + others
        moved = [result.moved[key] for key in MOVING]
        counts = (verdict.equal, verdict.excused, verdict.wrong, len(plain) - others)
        rows.append([setting.name, *counts, *moved, f"{result.seconds:.0f}"])
        if setting.needs:
            count = result.moved[setting.needs]
            report.check(f"{name}, {setting.name}: {setting.needs}", count, "> 0", count > 0)
    report.check(f"{name}: greedy outputs that are wrong", wrong, "0", wrong == 0)
    report.check(f"{name}: seeded outputs that depend on the setting", differ, "0", differ == 0)
    ties = sum(sum(map(one.is_tie, range(work.new))) for one in work.expected)
    columns = ["setting", "equal", "parted at a tie", "wrong", "seeded equal", *MOVING, "s"]
    title = f"{len(work.prompts)} prompts x {work.new} tokens, {len(plain)} seeded ones"
    report.table(f"{name}: {title}; {ties} near ties", columns, rows)


def check_model(report: Report, name: str, work: Work, progress: Progress) -> None:
    """Decode in every setting, and judge."""
    settings = progress.track(settings_for(work), description=name)
    judge(report, name, work, [(setting, decode(work, setting)) for setting in settings])


def save_tiny(kind: str, tokenizer_from: Path, target: Path) -> Path:
    """Write a tiny random LLM with the tokenizer of another; its weights are not small."""
    config_class, model_class = TINY[kind]
    vocab_size = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = model_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter_name.endswith("norm.weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.3 * noise)
    model.save_pretrained(target)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / file, target)
    return target


def prepare(path: Path, count: int, new: int, seed: int, extra: Sequence[str]) -> Work:
    """Draw prompts, and ask transformers."""
    prompts = draw_prompts(path, LENGTHS, count, seed, extra)
    return Work(path, prompts, new, reference_greedy(causal_lm(path), prompts, new))


def main() -> int:
    """Run the tool."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    extra = corpus_texts(options.data)
    report = Report(
        "decode_parity",
        "Parity of decoding",
        f"Prompts of {', '.join(map(str, LENGTHS))} tokens, float32, greedy, against transformers "
        "token for token; and the same prompts with tokens drawn by a seed, which have to be the "
        "same in all settings. The tiny models have three layers of random weights.",
    )
    with Progress(transient=True) as progress, tempfile.TemporaryDirectory() as folder:
        for path in options.model:
            work = prepare(path, options.prompts, options.tokens, options.seed, extra)
            check_model(report, path.name, work, progress)
        for kind in TINY:
            tiny = save_tiny(kind, options.model[0], Path(folder) / kind)
            work = prepare(tiny, options.prompts, options.tokens, options.seed, extra)
            check_model(report, f"tiny {kind}", work, progress)
    return report.finish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        action="append",
        help="model folder, repeatable (default: SmolLM2-135M-Instruct)",
    )
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="other prompts (default 0)")
    parser.add_argument(
        "--data", type=Path, default=beside("data"), help="folder with stsb/ and wikitext-2/"
    )
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    add_output_options(parser)
    options = parser.parse_args()
    options.model = options.model or [MODELS / "SmolLM2-135M-Instruct"]
    return options


if __name__ == "__main__":
    sys.exit(main())
