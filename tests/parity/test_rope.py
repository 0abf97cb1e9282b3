"""Rotary positions of every kind, in both styles of config.json, against transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from rose.models.errors import CheckpointError
from rose.models.loader import load
from rose.models.rotary import RotaryEmbedding
from tests import tiny
from tests.batches import ragged
from tests.parity.oracle import assert_states, reference_states, sequences

FULL, SLIDING = "full_attention", "sliding_attention"


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = [
    {"rope_theta": 500000.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    {"rope_theta": 700.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    {"rope_theta": 700.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {}},
    {"rope_parameters": None, "rope_scaling": None},
    {},
    {"rope_theta": 300.0, "rope_scaling": None},
    {"rope_theta": 300.0, "rope_scaling": {}},
    {"rope_theta": 300.0, "rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 3}},
    {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 3.0}},
    {"rope_scaling": LLAMA3},
    {"rope_theta": 500000.0, "rope_parameters": {**LLAMA3, "rope_theta": 1e6}},
    {"rope_scaling": YARN},
    {"rope_theta": 1e6, "rope_scaling": {**YARN, "attention_factor": 1.3, "beta_fast": 16}},
    {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}},
    {"rope_scaling": {**YARN, "factor": 1.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 99.0},
    },
    {"original_max_position_embeddings": 32, "rope_scaling": YARN},
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Path]:
    """One checkpoint per kind, whose config tests may rewrite."""
    folder = tmp_path_factory.mktemp("plain")
    return {kind: tiny.save_decoder(folder / kind, kind, head=False) for kind in ("llama", "qwen3")}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*(("llama", rope) for rope in ROPES), *(("qwen3", rope) for rope in ROPES[::4])],
    ids=str,
)
def test_rope(plain, kind, settings):
    path = plain[kind]
    keys = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
    tiny.edit_json(path / "config.json", **(dict.fromkeys(keys, ...) | settings))
    model = load(path)
    reference = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    rope = next(m for m in model.backbone.modules() if isinstance(m, RotaryEmbedding))
    positions = torch.tensor([0, 1, 100, 255])
    wanted = reference.rotary_emb(torch.zeros(1), positions[None])
    for mine, theirs in zip(rope(positions), wanted, strict=True):
        torch.testing.assert_close(mine, theirs[0], atol=1e-5, rtol=1e-5)
    batch = sequences(70, (200,))
    assert_states(model, batch, [reference(torch.tensor(batch)).last_hidden_state[0]], 5e-5)


def test_dynamic_rope_stretches_each_sequence_by_its_own_length(tmp_path):
    path = tiny.save_decoder(
        tmp_path,
        "llama",
        head=False,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    batch = sequences(70, (40, 7, 17, 16))
    expected = [reference_states(path, [ids])[0] for ids in batch]
    assert_states(load(path, max_model_len=40), batch, expected)


def test_rope_of_each_layer_type(tmp_path):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    path = tiny.save_decoder(
        tmp_path, "qwen3", head=False, use_sliding_window=True, sliding_window=5, layer_types=types
    )
    local, far = ({"rope_type": "default", "rope_theta": theta} for theta in (100.0, 1e6))
    tiny.edit_json(
        path / "config.json",
        rope_parameters={"sliding_attention": local, "full_attention": far},
    )
    backbone = load(path).backbone
    thetas = {kind: rope.config.theta for kind, rope in backbone.ropes.items()}
    assert thetas == {"sliding_attention": 100.0, "full_attention": 1e6}
    batch, _ = ragged(sequences(70))
    different = backbone(batch)
    tiny.edit_json(
        path / "config.json", rope_parameters={"sliding_attention": far, "full_attention": far}
    )
    same = load(path).backbone(batch)
    tiny.edit_json(path / "config.json", rope_parameters=far)
    torch.testing.assert_close(same, load(path).backbone(batch), atol=0, rtol=0)
    assert (different - same).abs().max() > 0.01
    tiny.edit_json(path / "config.json", rope_parameters={"sliding_attention": local})
    with pytest.raises(CheckpointError, match="full_attention"):
        load(path)
