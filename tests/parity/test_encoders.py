"""Every encoder from a tiny random checkpoint against transformers."""

import json
from pathlib import Path

import pytest
import torch

from rose.models.errors import CheckpointError
from rose.models.loader import load
from tests import tiny
from tests.batches import ragged
from tests.parity.oracle import assert_states, check, reference_states, sequences

KINDS = list(tiny.ENCODERS)
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {kind: tiny.save_encoder(folder / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batched_and_single(checkpoints, kind):
    model = check(checkpoints[kind])
    assert model.card.tasks == ("embed",)
    assert model.warnings == [w for w in model.warnings if "modules.json" in w]
    assert not any(spec.causal for spec in model.backbone.attention_specs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["masked_lm", "classifier"])
def test_backbone_of_a_model_with_a_head(tmp_path, kind, head):
    check(tiny.save_encoder(tmp_path, kind, head=head, seed=1), tasks=("embed",))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints(checkpoints, tmp_path, kind, dtype):
    path = tiny.copy(checkpoints[kind], tmp_path / "half")
    tiny.edit_tensors(path, lambda tensors: {n: t.to(dtype) for n, t in tensors.items()})
    check(path)
    batch, _ = ragged(sequences(40))
    exact = load(path).backbone(batch)
    half = load(path, dtype=str(dtype).removeprefix("torch.")).backbone(batch)
    assert half.dtype == dtype
    assert torch.cosine_similarity(exact, half.float()).min() > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_checkpoints(tmp_path, kind):
    check(tiny.shard(tiny.save_encoder(tmp_path, kind)))


VARIANTS = [
    ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    ("bert", {"type_vocab_size": 1, "num_attention_heads": 1}),
    ("bert", {"num_hidden_layers": 1, "intermediate_size": 7, "hidden_act": "relu"}),
    ("distilbert", {"activation": "relu", "n_heads": 2, "hidden_dim": 20}),
    ("gte", {"type_vocab_size": 0, "hidden_act": "silu"}),
    ("gte", {"type_vocab_size": 2, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("jina_bert", {"hidden_size": 48, "num_attention_heads": 6}),
    ("jina_bert", {"hidden_size": 48, "num_attention_heads": 6, "feed_forward_type": "reglu"}),
    ("jina_bert", {"feed_forward_type": "original", "hidden_act": "relu", "type_vocab_size": 1}),
    ("jina_bert_code", {"hidden_size": 48, "num_attention_heads": 6}),
    ("jina_bert_code", {"feed_forward_type": "reglu", "layer_norm_eps": 1e-3}),
    ("jina_bert_code", {"feed_forward_type": "original", "hidden_act": "relu"}),
    ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    ("modernbert", {"local_attention": 5, "hidden_activation": "silu", "norm_eps": 1e-3}),
    ("modernbert", {"layer_types": [SLIDING, FULL, SLIDING], "local_attention": 2}),
    (
        "modernbert",
        {"layer_types": [SLIDING] * 3, "rope_parameters": {SLIDING: {"rope_theta": 9.0}}},
    ),
    ("nomic_bert", {"head_dim": 16, "type_vocab_size": 1, "hidden_act": "gelu"}),
    ("nomic_bert", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    ("mpnet", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "num_attention_heads": 2}),
    ("roberta", {"pad_token_id": 3, "layer_norm_eps": 1e-5}),
    ("xlm-roberta", {"pad_token_id": 0, "type_vocab_size": 1}),
]


@pytest.mark.parametrize(("kind", "overrides"), VARIANTS, ids=str)
def test_variants(tmp_path, kind, overrides):
    check(tiny.save_encoder(tmp_path, kind, **overrides))


@pytest.mark.parametrize("kind", ["bert", "jina_bert", "nomic_bert", "roberta"])
def test_segments(checkpoints, kind):
    path = checkpoints[kind]
    ids, types = [2, 5, 6, 3, 7, 8, 3], [0, 0, 0, 0, 1, 1, 1]
    batch, _ = ragged([ids, ids], [types, [0] * len(ids)])
    wanted = [reference_states(path, [ids], token_type_ids=[t])[0] for t in (types, [0] * 7)]
    states = load(path).backbone(batch).split(len(ids))
    torch.testing.assert_close(states, tuple(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "mpnet"])
@pytest.mark.parametrize("pad_id", [0, 1, 3])
def test_pad_tokens_within_a_text_take_no_position(tmp_path, kind, pad_id):
    path = tiny.save_encoder(tmp_path, kind, pad_token_id=pad_id)
    batch = [[7, pad_id, 8, 9, pad_id, pad_id, 5], [pad_id], [1, 3, 0, 1, 3], [5, 6, pad_id], [9]]
    assert_states(load(path), batch, reference_states(path, batch))


@pytest.mark.parametrize(("pad_id", "usable"), [(1, 32), (3, 30), (0, 33)])
def test_the_longest_text_of_roberta_ends_with_the_table(tmp_path, pad_id, usable):
    settings = {"max_position_embeddings": 34, "pad_token_id": pad_id}
    path = tiny.save_encoder(tmp_path, "xlm-roberta", **settings)
    model = load(path)
    assert model.card.max_model_len == model.backbone.max_positions == usable
    assert load(path, max_model_len=34).card.max_model_len == usable
    batch = [[5 + i % 20 for i in range(length)] for length in range(28, usable + 1)]
    assert_states(model, batch, reference_states(path, batch))


def test_distances_of_mpnet_beyond_the_last_bucket(checkpoints):
    """All buckets are used, and a batch of unlike lengths shares one table."""
    check(checkpoints["mpnet"], lengths=(138, 137, 3, 138, 64))


@pytest.mark.parametrize(
    "settings",
    [
        {"global_attn_every_n_layers": 2, "layer_types": ..., "rope_parameters": ...},
        {"layer_types": ..., "rope_parameters": ..., "global_rope_theta": 300.0},
        {"rope_parameters": None, "local_rope_theta": 50.0, "global_rope_theta": 800.0},
        {"rope_parameters": ..., "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}},
        {"rope_parameters": {SLIDING: {"rope_theta": 20.0, "rope_type": "default"}}},
    ],
    ids=str,
)
def test_older_configs_of_modernbert(checkpoints, tmp_path, settings):
    path = tiny.copy(checkpoints["modernbert"], tmp_path / "older")
    tiny.edit_json(path / "config.json", **settings)
    check(path)


HUB_NOMIC = {
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 20,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 48,
    "n_layer": 3,
    "n_positions": 60,
    "pad_vocab_size_multiple": 4,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 67,
}


@pytest.mark.parametrize("factor", [None, 2.0])
def test_nomic_with_the_config_of_the_hub(tmp_path, factor):
    rope = {"rope_type": "dynamic", "factor": factor} if factor else {}
    positions = 20 if factor else 60
    settings = {"rope_parameters": rope, "max_position_embeddings": positions}
    path = tiny.save_encoder(tmp_path / "model", "nomic_bert", **settings)
    batch = sequences(60, (50, 12, 21, 20))
    expected = [reference_states(path, [ids])[0] for ids in batch]
    hub = HUB_NOMIC | {"rotary_scaling_factor": factor}
    (path / "config.json").write_text(json.dumps(hub))
    model = load(path, max_model_len=60)
    assert model.card.vocab_size == 68
    assert_states(model, batch, expected)
    for key, value in (("prenorm", True), ("rotary_emb_fraction", 0.5), ("n_inner", None)):
        (path / "config.json").write_text(json.dumps(hub | {key: value}))
        with pytest.raises(CheckpointError, match=key):
            load(path)


@pytest.mark.parametrize("kind", ["gte", "nomic_bert"])
def test_projections_that_are_stored_as_one_tensor_are_checked(checkpoints, tmp_path, kind):
    path = tiny.copy(checkpoints[kind], tmp_path / "changed")
    name = next(n for n in tiny.tensors(path) if "qkv" in n and n.endswith("weight"))
    tiny.edit_tensors(path, lambda t: t | {name: t[name][:-1]})
    with pytest.raises(CheckpointError, match=rf"{name}.*shape \[95, 32\].*\[96, 32\]"):
        load(path)
    tiny.edit_tensors(path, lambda t: {n: x for n, x in t.items() if n != name})
    with pytest.raises(CheckpointError, match=r"q_proj.*missing"):
        load(path)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("roberta", {"is_decoder": True}, "is_decoder"),
        ("roberta", {"pad_token_id": 39}, "pad_token_id 39"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id -1"),
        ("distilbert", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds"),
        ("distilbert", {"n_heads": 5}, "n_heads|num_attention_heads"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
        ("modernbert", {"layer_types": [FULL, "linear_attention", FULL]}, "layer_types"),
        ("modernbert", {"layer_types": [FULL]}, "layer_types"),
        ("modernbert", {"rope_parameters": {"rope_theta": 3.0}}, "rope_parameters"),
        ("modernbert", {"rope_parameters": {FULL: 3}}, "rope_parameters.full_attention"),
    ],
)
def test_what_is_not_computed_is_refused(checkpoints, tmp_path, kind, settings, named):
    path = tiny.copy(checkpoints[kind], tmp_path / "changed")
    tiny.edit_json(path / "config.json", **settings)
    with pytest.raises(CheckpointError, match=named):
        load(path)
