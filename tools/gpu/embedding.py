"""Embedding in this process: latency, scoring and throughput beside the reference libraries.

All embed the same token ids with the same weights on the same device, in turns; their vectors are
compared first.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import AutoModel

from rose import Engine
from tools.gpu import roofs
from tools.gpu.stage import Context, percentiles

LIMITS = {"minilm": 512, "qwen3": 4096}
LATENCY, SCORING, THROUGHPUT = (128, 512, 4096), (5, 25, 50), (512, 1024, 4096)
SCORING_TOKENS, TEXTS = 512, 400
COSINE = 0.999
Ids = np.ndarray
Run = Callable[[list[Ids]], Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    latency: tuple[int, ...]
    scoring: tuple[int, ...]
    scoring_tokens: int
    throughput: tuple[int, ...]
    texts: int
    runs: int


FULL = Sizes(LATENCY, SCORING, SCORING_TOKENS, THROUGHPUT, TEXTS, 40)
DRY = Sizes((8, 16), (2,), 16, (16,), 4, 2)


def run(context: Context) -> None:
    """Measure both models."""
    sizes = DRY if context.dry else FULL
    for name, limit in LIMITS.items():
        folder, device = context.folder / name, str(context.device)
        with Engine(
            folder, device=device, dtype=context.dtype, max_model_len=limit, tasks=("embed",)
        ) as engine:
            contenders = {
                "ROSE": lambda ids, engine=engine: torch.from_numpy(engine.embed(ids)),
                "sentence-transformers": _sentence_transformers(context, name),
                "transformers": _transformers(context, name),
            }
            _agree(context, name, contenders)
            _latency(context, name, contenders, sizes, limit)
            _scoring(context, name, contenders, sizes)
            _throughput(context, name, contenders, sizes, limit)


def _draw(count: int, tokens: int, seed: int = 0) -> list[Ids]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 290, tokens, dtype=np.int32) for _ in range(count)]


def _features(ids: list[Ids], device: torch.device) -> dict[str, Tensor]:
    """Texts of one length as the inputs of the reference libraries."""
    stacked = torch.from_numpy(np.stack(ids)).long().to(device)
    return {"input_ids": stacked, "attention_mask": torch.ones_like(stacked)}


def _sentence_transformers(context: Context, name: str) -> Run:
    model = SentenceTransformer(
        str(context.folder / name),
        device=str(context.device),
        model_kwargs={"dtype": getattr(torch, context.dtype)},
        local_files_only=True,
    )

    def embed(ids: list[Ids]) -> Tensor:
        parts = [
            model.forward(_features(ids[i : i + 32], context.device))["sentence_embedding"]
            for i in range(0, len(ids), 32)
        ]
        return torch.cat(parts).float().cpu()

    return embed


def _transformers(context: Context, name: str) -> Run:
    dtype = getattr(torch, context.dtype)
    model = AutoModel.from_pretrained(context.folder / name, dtype=dtype).eval().to(context.device)

    def embed(ids: list[Ids]) -> Tensor:
        parts = []
        for start in range(0, len(ids), 32):
            states = model(**_features(ids[start : start + 32], context.device)).last_hidden_state
            parts.append(states[:, -1] if name == "qwen3" else states.float().mean(1))
        return torch.nn.functional.normalize(torch.cat(parts).float(), dim=-1).cpu()

    return embed


def _agree(context: Context, name: str, contenders: dict[str, Run]) -> None:
    ids = _draw(4, 30)
    ours = contenders["ROSE"](ids)
    for other in ("sentence-transformers", "transformers"):
        cosine = torch.cosine_similarity(ours, contenders[other](ids), dim=-1).min().item()
        label = f"{name}: cosine with {other}"
        context.report.check(label, f"{cosine:.5f}", f"at least {COSINE}", cosine >= COSINE)


def _latency(
    context: Context, name: str, contenders: dict[str, Run], sizes: Sizes, limit: int
) -> None:
    rows = []
    for tokens in sizes.latency:
        if tokens <= limit:
            texts = [_draw(1, tokens, seed) for seed in range(sizes.runs + 3)]
            rows += _race(contenders, texts, [name, str(tokens)])
    columns = ["model", "tokens", "by", "p50 ms", "p90 ms", "p99 ms", "max ms"]
    context.report.table(f"Latency of one text, {name}", columns, rows)


def _scoring(context: Context, name: str, contenders: dict[str, Run], sizes: Sizes) -> None:
    rows = []
    for count in sizes.scoring:
        texts = [_draw(count, sizes.scoring_tokens, seed) for seed in range(sizes.runs // 2 + 3)]
        rows += _race(contenders, texts, [name, str(count)])
    columns = ["model", "texts", "by", "p50 ms", "p90 ms", "p99 ms", "max ms"]
    context.report.table(f"Scoring batches of {sizes.scoring_tokens} tokens, {name}", columns, rows)


def _race(
    contenders: dict[str, Run], texts: Sequence[list[Ids]], label: list[str]
) -> list[list[str]]:
    """Let all embed each of `texts` in turn; the first three warm up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number, ids in enumerate(texts):
        for name, embed in contenders.items():
            began = time.perf_counter()
            embed(ids)
            if number >= 3:
                times[name].append(1e3 * (time.perf_counter() - began))
    return [[*label, name, *percentiles(found)] for name, found in times.items()]


def _throughput(
    context: Context, name: str, contenders: dict[str, Run], sizes: Sizes, limit: int
) -> None:
    """Embed many texts at once, which ROSE cuts into batches of which two are in flight."""
    rows = []
    for tokens in sizes.throughput:
        if tokens > limit:
            continue
        ids = _draw(sizes.texts, tokens)
        for contender in ("ROSE", "sentence-transformers"):
            rate = len(ids) / min(_seconds(contenders[contender], ids) for _ in range(2))
            share = rate * _flops(context, name, tokens) / roofs.read(context.folder).flops
            row = [name, tokens, contender, f"{rate:.1f}", f"{rate * tokens:.0f}"]
            rows.append([*row, f"{100 * share:.0f} %"])
    columns = ["model", "tokens", "by", "texts/s", "tokens/s", "share of the matrix rate"]
    context.report.table(f"Throughput, {name}", columns, rows)


def _seconds(embed: Run, ids: list[Ids]) -> float:
    began = time.perf_counter()
    embed(ids)
    return time.perf_counter() - began


def _flops(context: Context, name: str, tokens: int) -> float:
    """Operations of the linear layers for one text; attention comes on top."""
    config = json.loads((context.folder / name / "config.json").read_text())
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim", width // heads)
    kv_heads = config.get("num_key_value_heads", heads)
    attention = width * dim * (2 * heads + 2 * kv_heads)
    mlp = width * inner * (3 if name == "qwen3" else 2)
    return 2.0 * tokens * config["num_hidden_layers"] * (attention + mlp)
