"""Every encoder from a tiny random checkpoint against transformers."""

from pathlib import Path

import pytest
import torch

from rose.models.errors import CheckpointError
from rose.models.loader import load
from tests import tiny
from tests.batches import ragged
from tests.parity.oracle import assert_states, check, reference_states, sequences

KINDS = list(tiny.ENCODERS)


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
    assert torch.cosine_similarity(exact, half.float()).min() > 0.999


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_checkpoints(tmp_path, kind):
    check(tiny.shard(tiny.save_encoder(tmp_path, kind)))


VARIANTS = [
    ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    ("bert", {"type_vocab_size": 1, "num_attention_heads": 1}),
    ("bert", {"num_hidden_layers": 1, "intermediate_size": 7, "hidden_act": "relu"}),
    ("distilbert", {"activation": "relu", "n_heads": 2, "hidden_dim": 20}),
    ("mpnet", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "num_attention_heads": 2}),
    ("roberta", {"pad_token_id": 3, "layer_norm_eps": 1e-5}),
    ("xlm-roberta", {"pad_token_id": 0, "type_vocab_size": 1}),
]


@pytest.mark.parametrize(("kind", "overrides"), VARIANTS, ids=str)
def test_variants(tmp_path, kind, overrides):
    check(tiny.save_encoder(tmp_path, kind, **overrides))


@pytest.mark.parametrize("kind", ["bert", "roberta"])
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
    ("kind", "settings", "named"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("roberta", {"is_decoder": True}, "is_decoder"),
        ("roberta", {"pad_token_id": 39}, "pad_token_id 39"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id -1"),
        ("distilbert", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds"),
        ("distilbert", {"n_heads": 5}, "n_heads|num_attention_heads"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
    ],
)
def test_what_is_not_computed_is_refused(checkpoints, tmp_path, kind, settings, named):
    path = tiny.copy(checkpoints[kind], tmp_path / "changed")
    tiny.edit_json(path / "config.json", **settings)
    with pytest.raises(CheckpointError, match=named):
        load(path)
