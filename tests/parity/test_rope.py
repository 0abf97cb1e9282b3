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


GEMMA3_ROPES = [
    {},
    {"rope_theta": 5e5, "rope_local_base_freq": 300.0},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 9e5}}},
    {
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 2e5},
            SLIDING: {"rope_type": "default", "rope_theta": 77.0},
        },
        "rope_theta": 5.0,
    },
]


@pytest.mark.parametrize("settings", GEMMA3_ROPES, ids=str)
def test_gemma3_rotates_windows_by_another_base(tmp_path, settings):
    path = tiny.save_decoder(tmp_path, "gemma3_text", head=False)
    keys = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")
    tiny.edit_json(path / "config.json", **(dict.fromkeys(keys, ...) | settings))
    batch = sequences(70, (60, 9))
    assert_states(load(path), batch, reference_states(path, batch), 2e-5)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.1, 1.5], "long_factor": [2.0, 9.0]}
PHI3_ROPES = [
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
        "partial_rotary_factor": 0.5,
    },
    {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5},
    {"rope_scaling": LONGROPE | {"attention_factor": 1.2}, "partial_rotary_factor": 0.5},
    {"rope_scaling": LONGROPE | {"factor": 4.0}, "partial_rotary_factor": 0.5},
    {
        "rope_scaling": LONGROPE
        | {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    },
]


@pytest.mark.parametrize("settings", PHI3_ROPES, ids=str)
def test_phi3(tmp_path, settings):
    """Sequences on both sides of the original length share a batch."""
    path = tiny.save_decoder(
        tmp_path, "phi3", head=False, original_max_position_embeddings=20, pad_token_id=0
    )
    keys = ("rope_parameters", "rope_scaling", "partial_rotary_factor")
    tiny.edit_json(path / "config.json", **(dict.fromkeys(keys, ...) | settings))
    batch = sequences(70, (40, 7, 21, 20))
    expected = [reference_states(path, [ids])[0] for ids in batch]
    assert_states(load(path), batch, expected, 2e-5)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_phi3s_longrope(tmp_path, name):
    path = tiny.save_decoder(tmp_path, "phi3", head=False, original_max_position_embeddings=20)
    rope = {"rope_parameters": ..., "rope_scaling": LONGROPE, "partial_rotary_factor": 0.5}
    tiny.edit_json(path / "config.json", **rope)
    batch, _ = ragged(sequences(70, (40, 7)))
    expected = load(path).backbone(batch)
    older = {key: value for key, value in LONGROPE.items() if key != "rope_type"}
    tiny.edit_json(path / "config.json", rope_scaling=older | {"type": name})
    torch.testing.assert_close(load(path).backbone(batch), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "su"}}, "short_factor"),
        ({"rope_scaling": LONGROPE}, "short_factor: 4 positive"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1, 2, 3, 0]}}, "short_factor: 4 positive"),
    ],
    ids=str,
)
def test_phi3_ropes_that_are_refused(tmp_path, settings, named):
    path = tiny.save_decoder(tmp_path, "phi3", head=False)
    tiny.edit_json(path / "config.json", **({"rope_parameters": ...} | settings))
    with pytest.raises(CheckpointError, match=named):
        load(path)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
GROWING = [
    ("llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
    (
        "phi3",
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": LONGROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
]


@pytest.mark.parametrize(("kind", "settings"), GROWING, ids=["dynamic", "longrope"])
def test_keys_are_kept_only_while_their_rotation_stays(tmp_path, kind, settings):
    path = tiny.save_decoder(tmp_path, kind, **settings)
    model = load(path, tasks=("generate",))
    assert model.card.max_model_len == 16
    assert load(path, tasks=("generate",), max_model_len=9).card.max_model_len == 9
    with pytest.raises(CheckpointError, match=r"max_model_len 17.*beyond 16 tokens"):
        load(path, tasks=("generate",), max_model_len=17)
    with pytest.raises(CheckpointError, match="max_model_len"):
        load(path, tasks=("embed", "generate"), max_model_len=17)
    assert load(path, tasks=("embed",), max_model_len=40).card.max_model_len == 40
    warned = [w for w in model.warnings if "rotation of keys" in w]
    assert bool(warned) == (settings["max_position_embeddings"] > 16)
