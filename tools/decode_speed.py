#!/usr/bin/env python3
"""Compare the speed of decoding of ROSE with `transformers.generate`, and time the first token.

Both continue the same prompts with the same weights on the same cores, greedily and in float32,
in turns. Their tokens are compared first. The time of a run holds the prefill of its prompts.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from rose.runtime.generation import GenerationLoop
from tools.decoding import (
    Ids,
    Verdict,
    decode_loop,
    draw_prompts,
    generate,
    greedy,
    reference_greedy,
    run,
)
from tools.references import causal_lm
from tools.report import MODELS, Report, add_output_options, beside, cores
from tools.texts import corpus_texts

PROMPT, LONG_PROMPT = 64, 512  # tokens
FEWEST_TURNS = 3


@dataclass(frozen=True)
class Speed:
    """Both contenders, and where the figures go."""

    loop: GenerationLoop
    model: PreTrainedModel
    options: argparse.Namespace
    report: Report

    def check_tokens(self, prompts: Sequence[Ids]) -> None:
        """Compare greedy tokens, which warms both up."""
        new = self.options.tokens
        expected = reference_greedy(self.model, prompts, new)
        ours = run(self.loop, prompts, [greedy(new, "check")] * len(prompts))
        wrong = Verdict.of(ours, expected).wrong
        name = f"greedy outputs of {len(prompts)} that are wrong"
        self.report.check(name, wrong, "0", wrong == 0)

    def time_streams(self, prompts: Sequence[Ids]) -> None:
        """Time the decoding of 1, 8, ... streams."""
        rows = [self._time_batch(prompts[:streams]) for streams in self.options.streams]
        columns = ["streams", "ROSE tokens/s", "transformers tokens/s", "ratio", "in the turns"]
        title = f"prompts of {PROMPT} tokens, {self.options.tokens} new ones each"
        self.report.table(title, columns, rows)

    def _time_batch(self, batch: Sequence[Ids]) -> list[object]:
        new, streams = self.options.tokens, len(batch)

        def ours(turn: int) -> None:
            run(self.loop, batch, [greedy(new, f"{streams} {turn}")] * streams)

        limit = self.options.time_limit / len(self.options.streams)
        seconds = take_turns(
            {"ROSE": ours, "transformers": lambda _: generate(self.model, batch, new)},
            self.options.repeats,
            limit,
        )
        self.report.data[f"{streams} streams"] = seconds
        one, other = (statistics.median(times) for times in seconds.values())
        turns = [b / a for a, b in zip(seconds["ROSE"], seconds["transformers"], strict=True)]
        rates = [f"{streams * new / median:.1f}" for median in (one, other)]
        spread = f"{min(turns):.2f} to {max(turns):.2f}"
        return [streams, *rates, f"{other / one:.2f}", spread]

    def time_first_token(self, prompts: Sequence[Ids]) -> None:
        """Time one token behind a long prompt: computed whole, and with a cached prefix."""

        def first_token(turn: int) -> None:
            run(self.loop, [prompts[turn % len(prompts)]], [greedy(1, f"first {turn}")])

        before = self.loop.stats().prefix_hit_tokens
        seconds = take_turns(
            {
                "ROSE, cold": first_token,
                "ROSE, prefix in the cache": first_token,
                "transformers": lambda turn: generate(
                    self.model, [prompts[turn % len(prompts)]], 1
                ),
            },
            self.options.repeats,
            self.options.time_limit / 4,
        )
        self.report.data["first token"] = seconds
        hit = (self.loop.stats().prefix_hit_tokens - before) / len(seconds["transformers"])
        self.report.check("tokens of a prompt found in the cache", f"{hit:.0f}", "> 0", hit > 0)
        rows = [
            [name, f"{1000 * statistics.median(times):.0f}", f"{1000 * min(times):.0f}", len(times)]
            for name, times in seconds.items()
        ]
        title = f"time to the first token behind a prompt of {LONG_PROMPT} tokens"
        self.report.table(title, ["engine", "ms, median", "ms, least", "turns"], rows)


def take_turns(
    contenders: dict[str, Callable[[int], object]], repeats: int, limit_s: float
) -> dict[str, list[float]]:
    """Time each once a turn, `repeats` times, or at least three if that takes too long.

    Each is called with the number of the turn. Returns the seconds.
    """
    deadline = time.perf_counter() + limit_s
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats):
        if turn >= FEWEST_TURNS and time.perf_counter() > deadline:
            break
        for name, work in contenders.items():
            began = time.perf_counter()
            work(turn)
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> int:
    """Run the tool."""
    options = _options()
    torch.set_num_threads(options.threads)
    report = Report(
        "decode_speed",
        "Speed of decoding",
        f"Greedy decoding of {options.model.name} in float32 on {options.threads} threads, in "
        "process, against `transformers.generate` in turns. Tokens per second are over all "
        "streams; the prefill of the prompts is in the time.",
    )
    extra = corpus_texts(options.data)
    most = max(options.streams)
    prompts = draw_prompts(options.model, [PROMPT], most, options.seed, extra)
    long_prompts = draw_prompts(options.model, [LONG_PROMPT], 3, options.seed, extra)
    model = causal_lm(options.model)
    with (
        Progress(transient=True) as progress,
        decode_loop(options.model, max_num_seqs=most, max_model_len=1024) as loop,
    ):
        speed = Speed(loop, model, options, report)
        task = progress.add_task("decoding", total=3)
        steps = (
            lambda: speed.check_tokens(prompts),
            lambda: speed.time_streams(prompts),
            lambda: speed.time_first_token(long_prompts),
        )
        for step in steps:
            step()
            progress.advance(task)
    return report.finish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODELS / "SmolLM2-135M-Instruct")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a stream (default 64)")
    parser.add_argument("--repeats", type=int, default=5, help="turns (default 5)")
    parser.add_argument(
        "--time-limit", type=float, default=600, help="seconds for the turns, beyond three of each"
    )
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--seed", type=int, default=0, help="other prompts (default 0)")
    parser.add_argument(
        "--data", type=Path, default=beside("data"), help="folder with stsb/ and wikitext-2/"
    )
    add_output_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
