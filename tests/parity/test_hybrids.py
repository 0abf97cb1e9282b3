"""Hybrid decoders from tiny random checkpoints against transformers, with and without states."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rose.kernels.attention import BACKENDS
from rose.models.errors import CheckpointError
from rose.models.loader import load
from rose.models.plan import plan_checkpoint
from rose.models.weight_checks import check_headers
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.worker import DeviceWorker
from tests import tiny
from tests.batches import ragged, run_paged
from tests.parity.oracle import LENGTHS, check, reference_states, sequences

KINDS = list(tiny.HYBRIDS)
COMPOSITES = list(tiny.COMPOSITES)
FULL, LINEAR = "full_attention", "linear_attention"
LONG = (150, 1, 64, 70)  # more than a chunk of the delta rule


@pytest.mark.parametrize("kind", [*KINDS, *COMPOSITES])
def test_ragged_batched_and_single(tmp_path, kind):
    check(tiny.save_decoder(tmp_path, kind), (*LENGTHS, *LONG))


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_checkpoints(tmp_path, kind):
    check(tiny.shard(tiny.save_decoder(tmp_path, kind, head=False)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints(tmp_path, kind, dtype):
    path = tiny.save_decoder(tmp_path, kind)
    tiny.edit_tensors(path, lambda tensors: {n: t.to(dtype) for n, t in tensors.items()})
    check(path)
    batch, _ = ragged(sequences(70))
    exact = load(path).backbone(batch)
    half = load(path, dtype=str(dtype).removeprefix("torch.")).backbone(batch)
    assert half.dtype == dtype
    assert torch.cosine_similarity(exact, half.float()).quantile(0.1) > 0.99


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen3_next", {"attention_bias": True, "norm_topk_prob": False, "hidden_act": "gelu"}),
        ("qwen3_next", {"num_experts": 0, "linear_num_key_heads": 1}),
        ("qwen3_next", {"mlp_only_layers": [0], "linear_num_value_heads": 2}),
        ("qwen3_next", {"decoder_sparse_step": 2, "layer_types": [FULL] * 3}),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 2, "layer_types": [LINEAR, LINEAR, FULL]}),
        ("qwen3_5_text", {"linear_num_key_heads": 4, "linear_key_head_dim": 16}),
        ("qwen3_5_text", {"num_hidden_layers": 5, "layer_types": None}),
        (
            "qwen3_5_text",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                }
            },
        ),
        ("qwen3_5_moe_text", {"num_experts_per_tok": 1, "rms_norm_eps": 1e-2}),
    ],
)
def test_variants(tmp_path, kind, overrides):
    model = check(tiny.save_decoder(tmp_path, kind, **overrides))
    assert not model.warnings


def stack_experts(tensors):
    """Store the same projections of all experts as one tensor, as in memory of transformers."""
    stacked = {n: t for n, t in tensors.items() if ".experts." not in n}
    for owner in {n.partition(".experts.")[0] for n in tensors if ".experts." in n}:
        gates, ups, downs = (
            torch.stack([tensors[f"{owner}.experts.{i}.{part}_proj.weight"] for i in range(5)])
            for part in ("gate", "up", "down")
        )
        stacked[f"{owner}.experts.gate_up_proj"] = torch.cat((gates, ups), dim=1)
        stacked[f"{owner}.experts.down_proj"] = downs
    return stacked


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text", "qwen3_5_moe"])
def test_experts_in_one_tensor(tmp_path, kind):
    path = tiny.save_decoder(tmp_path, kind)
    tiny.edit_tensors(path, stack_experts)
    check(path)


def test_a_stack_of_another_number_of_experts_is_refused(tmp_path):
    path = tiny.save_decoder(tmp_path, "qwen3_5_moe_text")
    tiny.edit_tensors(path, stack_experts)
    tiny.edit_json(path / "config.json", num_experts=4)
    with pytest.raises(CheckpointError, match=r"gate.weight.*\[5, 32\].*\[4, 32\]"):
        load(path)
    tiny.edit_tensors(
        path, lambda all: {n: t[:4] if "mlp.gate." in n else t for n, t in all.items()}
    )
    with pytest.raises(
        CheckpointError, match=r"experts.gate_up_proj.*\[5, 40, 32\].*\[4, 40, 32\]"
    ):
        load(path)


def test_layer_types_by_interval(tmp_path):
    """Checkpoints of the first days say how many layers there are to one of full attention."""
    path = tiny.save_decoder(tmp_path, "qwen3_next", layer_types=[LINEAR, FULL, LINEAR])
    config = json.loads((path / "config.json").read_text())
    rope = config["rope_parameters"]
    del rope["partial_rotary_factor"]  # the default is a quarter
    tiny.edit_json(path / "config.json", layer_types=..., full_attention_interval=2)
    tiny.edit_json(path / "config.json", rope_parameters=..., rope_theta=rope["rope_theta"])
    check(path)


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_5"])
@pytest.mark.parametrize("steps", [(1,), (1, 5, 1, 1, 7), (70, 1)], ids=str)
def test_with_states_in_any_steps_equals_without(tmp_path, kind, steps):
    model = load(tiny.save_decoder(tmp_path, kind))
    batch = sequences(70, (9, 1, 14, 80) if steps == (70, 1) else (9, 1, 14))
    packed, cu = ragged(batch)
    expected = model.backbone(packed).split(cu.diff().tolist())
    for found, wanted in zip(run_paged(model.backbone, batch, steps), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


def test_pages_and_states_are_of_the_layers_that_need_them(tmp_path):
    layer_types = [LINEAR, FULL, LINEAR, LINEAR, FULL]
    path = tiny.save_decoder(tmp_path, "qwen3_5_text", layer_types=layer_types, num_hidden_layers=5)
    backbone = load(path).backbone
    assert [spec.layer for spec in backbone.attention_specs] == [0, 1]
    assert [spec.layer for spec in backbone.state_specs] == [0, 1, 2]


@pytest.mark.parametrize("kind", [*KINDS, *COMPOSITES])
@pytest.mark.parametrize("tied", [True, False])
def test_logits(tmp_path, kind, tied):
    path = tiny.save_decoder(tmp_path, kind, tie_word_embeddings=tied)
    model = load(path)
    assert model.lm is not None
    assert model.card.tasks == ("generate",)
    assert model.card.generation.eos_token_ids == (0,)
    ids = sequences(70, (12,))[0]
    logits = model.lm.logits(model.lm(ragged([ids])[0]))
    reference = tiny.COMPOSITES[kind][1] if kind in COMPOSITES else AutoModelForCausalLM
    wanted = reference.from_pretrained(path)(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5"])
def test_scores(tmp_path, kind):
    path = tiny.save_decoder(tmp_path, kind, head="classifier", num_labels=3)
    model = load(path)
    assert model.card.tasks == ("classify",)
    batch = sequences(70)
    reference = AutoModelForSequenceClassification.from_pretrained(path)
    expected = torch.cat([reference(torch.tensor([ids])).logits for ids in batch])
    torch.testing.assert_close(model.classifier(*ragged(batch)), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, *COMPOSITES])
@pytest.mark.parametrize("deterministic", [False, True])
def test_embedding_runtime(tmp_path, kind, deterministic):
    """Texts in a batch, sorted and packed, get the last hidden states that each has alone."""
    path = tiny.save_decoder(tmp_path, kind)
    model = load(path, tasks=("embed",))
    batch = sequences(70, (*LENGTHS, 90))
    worker = DeviceWorker()
    runtime = EmbeddingRuntime(
        model.embedding,
        BACKENDS.load("torch_sdpa")(),
        worker,
        deterministic=deterministic,
        recurrent=True,
    )
    assert not runtime.can_use_graphs
    lengths = np.array([len(ids) for ids in batch], np.int32)
    packed = EmbedBatch(np.concatenate(batch).astype(np.int32), lengths, np.zeros_like(lengths))
    vectors = runtime.step(packed).result(60)
    alone = [runtime.step(single).result(60) for single in packed.singles()]
    worker.close()
    states = reference_states(path, batch)
    expected = torch.stack([state[-1] for state in states])
    torch.testing.assert_close(vectors, expected, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(alone), vectors, atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat(alone), vectors) or not deterministic


@pytest.mark.parametrize("kind", COMPOSITES)
def test_the_language_model_of_one_that_sees(tmp_path, kind):
    path = tiny.save_decoder(tmp_path, kind)
    plan = plan_checkpoint(path)
    check_headers(plan)  # whose vision part has more layers than the language model
    sources = {setting.name: setting.source for setting in plan.settings}
    assert sources["hidden_size"] == "config.json: text_config"
    assert not any("visual" in warning for warning in plan.warnings)
    assert not check(tiny.save_decoder(tmp_path / "alone", kind, head=False)).lm


def test_a_composite_without_text_settings_is_refused(tmp_path):
    path = tiny.save_decoder(tmp_path, "qwen3_5")
    tiny.edit_json(path / "config.json", text_config=...)
    with pytest.raises(CheckpointError, match="text_config is missing"):
        load(path)


def test_layers_that_predict_several_tokens_are_left_out(tmp_path):
    path = tiny.save_decoder(tmp_path, "qwen3_next")
    extra = {"mtp.layers.0.input_layernorm.weight": torch.ones(32)}
    tiny.edit_tensors(path, lambda tensors: tensors | extra)
    check_headers(plan_checkpoint(path))
    check(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_is_refused(tmp_path, kind, settings):
    path = tiny.save_decoder(tmp_path, kind)
    with pytest.raises(CheckpointError, match=r"option bidirectional.*cannot be bidirectional"):
        load(path, bidirectional=True)
    tiny.edit_json(path / "config.json", **settings)
    with pytest.raises(CheckpointError, match=f"{next(iter(settings))}.*cannot be bidirectional"):
        load(path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"layer_types": [LINEAR] * 3}, "layer_types.*at least one"),
        ({"layer_types": [LINEAR, FULL, "sliding_attention"]}, "layer_types"),
        ({"layer_types": [LINEAR, FULL]}, "layer_types"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads.*multiple"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 3}, "conv1d.weight"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"partial_rotary_factor": 0.01, "rope_parameters": ...}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, settings, named):
    path = tiny.save_decoder(tmp_path, "qwen3_next")
    tiny.edit_json(path / "config.json", **settings)
    with pytest.raises(CheckpointError, match=named):
        load(path)
