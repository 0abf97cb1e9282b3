"""Every architecture on the device against transformers on the CPU, by every back end."""

import tempfile
from pathlib import Path

import torch
import transformers
from torch import Tensor

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import AttentionBackend, RaggedLayout
from rose.models.backbone import Backbone
from rose.models.batch import TokenBatch
from rose.models.loader import load
from tests.parity.oracle import reference_states, sequences
from tools.gpu.stage import Context
from tools.gpu.subjects import backends

# Architectures that the machine's transformers may be too old for: their names, to be None there.
for _name in ("GteConfig", "GteModel"):
    if not hasattr(transformers, _name):
        setattr(transformers, _name, None)

from tests import tiny  # noqa: E402 - it imports those names

FLOAT32_ERROR = 2e-3  # of hidden states around 1; the device sums in another order
HALF_COSINE = 0.998
LIBRARY_MODELS: dict[str, dict[str, object]] = {
    "bert": {"hidden_size": 64, "num_attention_heads": 2},
    "qwen3": {"head_dim": 128},
}


def run(context: Context) -> None:
    """Compare hidden states, in float32 by torch and in bfloat16 by the libraries."""
    few = list(LIBRARY_MODELS)
    kinds = tiny.ENCODERS | tiny.DECODERS
    known = [kind for kind, (config, _) in kinds.items() if config is not None]
    rows = [_by_torch(context, kind) for kind in known if not context.dry or kind in few]
    rows += [[kind, "transformers is too old"] for kind in kinds.keys() - set(known)]
    context.report.table("Architectures by torch_sdpa in float32", ["kind", "largest error"], rows)
    rows = [row for kind in LIBRARY_MODELS for row in _by_libraries(context, kind)]
    columns = ["kind", "back end", "least cosine"]
    context.report.table("Architectures by the libraries in bfloat16", columns, rows)


def _save(folder: Path, kind: str, **changes: object) -> Path:
    save = tiny.save_encoder if kind in tiny.ENCODERS else tiny.save_decoder
    return save(folder, kind, **changes)


def _by_torch(context: Context, kind: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = _save(Path(folder), kind)
        model = load(path, device=str(context.device), dtype="float32")
        texts = sequences(model.card.vocab_size)
        expected = torch.cat(reference_states(path, texts))
        backend = BACKENDS.load("torch_sdpa")()
        states = hidden_states(model.backbone, texts, backend, context.device)
    error = (states - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    bound = f"at most {FLOAT32_ERROR}"
    context.report.check(f"{kind} in float32", f"{error:.1e}", bound, error <= FLOAT32_ERROR)
    return [kind, f"{error:.1e}"]


def _by_libraries(context: Context, kind: str) -> list[list[str]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = _save(Path(folder), kind, **LIBRARY_MODELS[kind])
        model = load(path, device=str(context.device), dtype="bfloat16")
        texts = sequences(model.card.vocab_size)
        expected = torch.cat(reference_states(path, texts))
        for backend in backends(context, model.backbone.attention_specs):
            states = hidden_states(model.backbone, texts, backend, context.device)
            cosine = torch.cosine_similarity(states, expected, dim=-1).min().item()
            name = f"{kind} by {backend.name}"
            kept = cosine >= HALF_COSINE
            context.report.check(name, f"{cosine:.5f}", f"at least {HALF_COSINE}", kept)
            rows.append([kind, backend.name, f"{cosine:.5f}"])
    return rows


def hidden_states(
    backbone: Backbone, texts: list[list[int]], backend: AttentionBackend, device: torch.device
) -> Tensor:
    """Run packed texts; returns float32 [tokens, channels] on the host."""
    lengths = tuple(map(len, texts))
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    ids = torch.tensor([token for text in texts for token in text], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    attention = backend.plan_ragged(RaggedLayout(ends, lengths))
    return backbone(TokenBatch(ids, positions, attention)).float().cpu()
