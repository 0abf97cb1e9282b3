"""Prints how far each architecture's tiny random model is from transformers.

Run it by `python -m tests.parity.table`. Errors are the largest absolute difference of hidden
states, whose values are about 1 to 4: together in one packed batch, alone, and (of decoders) in
pages, chunk by chunk; the last column is the cosine of bfloat16 to float32.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rose.models.loader import LoadedModel, load
from tests import tiny
from tests.batches import ragged, run_paged
from tests.parity.oracle import reference_states, sequences

LENGTHS = (1, 7, 2, 33, 16)


def main() -> None:
    """Print the table."""
    print("| architecture | attention | packed | alone | paged | largest | bf16 cosine |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in tiny.ENCODERS:
        with tempfile.TemporaryDirectory() as folder:
            print(row(kind, "full", tiny.save_encoder(Path(folder), kind)), flush=True)
    for kind in tiny.DECODERS:
        for causal in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                path = tiny.save_decoder(Path(folder), kind, is_causal=causal)
                print(row(kind, "causal" if causal else "full", path), flush=True)
    for kind in (*tiny.HYBRIDS, *tiny.COMPOSITES):
        with tempfile.TemporaryDirectory() as folder:
            print(row(kind, "causal", tiny.save_decoder(Path(folder), kind)), flush=True)


def row(kind: str, attention: str, path: Path) -> str:
    """Measure one model."""
    batch = sequences(60, LENGTHS)
    expected = reference_states(path, batch)
    model = load(path)
    packed, cu = ragged(batch)
    together = model.backbone(packed).split(cu.diff().tolist())
    alone = [model.backbone(ragged([ids])[0]) for ids in batch]
    errors = [f"{largest(together, expected):.1e}", f"{largest(alone, expected):.1e}", ""]
    if attention == "causal":
        errors[2] = f"{largest(run_paged(model.backbone, batch, (3, 1, 9)), expected):.1e}"
    size = max(states.abs().max().item() for states in expected)
    cosine = bf16_cosine(model, path, batch)
    return f"| {kind} | {attention} | {' | '.join(errors)} | {size:.1f} | {cosine:.4f} |"


def largest(found: "list[Tensor] | tuple[Tensor, ...]", expected: list[Tensor]) -> float:
    """The largest difference."""
    return max(_differences(found, expected))


def _differences(
    found: "list[Tensor] | tuple[Tensor, ...]", expected: list[Tensor]
) -> Iterator[float]:
    for mine, theirs in zip(found, expected, strict=True):
        yield (mine - theirs).abs().max().item()


def bf16_cosine(model: LoadedModel, path: Path, batch: list[list[int]]) -> float:
    """The mean cosine of hidden states in bfloat16 to those in float32."""
    packed, _ = ragged(batch)
    half = load(path, dtype="bfloat16").backbone(packed)
    return torch.cosine_similarity(model.backbone(packed), half.float()).mean().item()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
