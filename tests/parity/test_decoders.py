"""Every decoder from a tiny random checkpoint against transformers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaModel

from rose.models.errors import CheckpointError
from rose.models.loader import load
from rose.models.registry import ARCHITECTURES
from tests import tiny
from tests.batches import ragged, run_paged
from tests.parity.oracle import assert_states, check, reference_states, sequences

KINDS = list(tiny.DECODERS)
FULL, SLIDING = "full_attention", "sliding_attention"


def test_every_architecture_is_tested():
    """An entry of tests.tiny is what a new one needs; pplx-embed is tested with its recipe."""
    hybrids = {*tiny.HYBRIDS, *tiny.COMPOSITES}
    others = {*tiny.ENCODERS, *tiny.DECODERS, "bidirectional_pplx_qwen3"}
    assert set(ARCHITECTURES) == others | hybrids


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batched_and_single(tmp_path, kind):
    check(tiny.save_decoder(tmp_path, kind))


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
        ("llama", {"head_dim": 24}),
        ("llama", {"num_key_value_heads": None}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True, "head_dim": 8}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("qwen2", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        ("qwen2", {"sliding_window": 4, "max_window_layers": 0}),
        ("mistral", {"sliding_window": None, "head_dim": 24}),
        ("phi3", {"sliding_window": 5, "num_key_value_heads": None, "hidden_act": "gelu"}),
        ("gemma", {"num_key_value_heads": 1, "hidden_act": "gelu", "attention_bias": True}),
        ("gemma2", {"attn_logit_softcapping": 1.0, "sliding_window": 3}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma2", {"layer_types": [FULL, FULL, SLIDING], "hidden_activation": "relu"}),
        ("gemma3_text", {"layer_types": [SLIDING] * 3, "query_pre_attn_scalar": 16}),
        ("olmo2", {"num_key_value_heads": None, "attention_bias": True, "hidden_act": "gelu"}),
        ("olmo2", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 3, "mlp_only_layers": []}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "num_experts": 4, "attention_bias": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4, "hidden_act": "gelu"}),
    ],
)
def test_decoder_variants(tmp_path, kind, overrides):
    check(tiny.save_decoder(tmp_path, kind, **overrides))


@pytest.mark.parametrize(
    ("kind", "window"), [*((kind, None) for kind in KINDS), ("qwen2", 4), ("qwen3", 4)]
)
def test_bidirectional_decoder(tmp_path, kind, window):
    overrides: dict[str, object] = {"is_causal": False}
    if window:
        overrides |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model = check(tiny.save_decoder(tmp_path, kind, **overrides))
    assert model.card.tasks == ("embed",)
    assert not model.backbone.attention_specs[0].causal


@pytest.mark.parametrize("window", [2, 6, 7, 100])
def test_windows_of_a_bidirectional_gemma_are_whole_widths(tmp_path, window):
    """EmbeddingGemma's shape: the config gives the whole width, each side sees half of it."""
    settings = {"use_bidirectional_attention": True, "sliding_window": window}
    path = tiny.save_decoder(tmp_path, "gemma3_text", head=False, **settings)
    stored = json.loads((path / "config.json").read_text())["sliding_window"]
    model = check(path)
    assert model.backbone.attention_specs[0].window == (stored // 2,) * 2
    assert model.card.tasks == ("embed",)


def test_bidirectional_by_the_other_key_and_by_option(tmp_path):
    path = tiny.save_decoder(tmp_path / "causal", "qwen3", head=False)
    by_key = tiny.copy(path, tmp_path / "key")
    tiny.edit_json(by_key / "config.json", use_bidirectional_attention=True)
    batch = sequences(70)
    expected = reference_states(path, batch, is_causal=False)
    assert_states(load(by_key), batch, expected)
    assert_states(load(path, bidirectional=True), batch, expected)
    assert_states(load(by_key, bidirectional=False), batch, reference_states(path, batch))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_only_bidirectional_attention_sees_the_last_token_early(tmp_path, kind, causal):
    model = load(tiny.save_decoder(tmp_path, kind, is_causal=causal))
    first, second = (model.backbone(ragged([[5, 6, 7, last]])[0]) for last in (8, 9))
    assert torch.equal(first[:3], second[:3]) == causal


@pytest.mark.parametrize(
    ("kind", "sliding"), [*((kind, False) for kind in KINDS), ("qwen2", True), ("qwen3", True)]
)
def test_paged_equals_ragged(tmp_path, kind, sliding):
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    model = load(tiny.save_decoder(tmp_path, kind, **(window if sliding else {})))
    batch = sequences(70, (9, 1, 14))
    packed, cu = ragged(batch)
    expected = model.backbone(packed).split(cu.diff().tolist())
    # A prefill in chunks, with decodes beside.
    states = run_paged(model.backbone, batch, (1, 5, 1, 1, 7))
    for found, wanted in zip(states, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_heads_that_do_not_divide_the_hidden_size(tmp_path):
    """transformers refuses to load such a config, but computes it."""
    overrides = {"hidden_size": 56, "num_attention_heads": 4, "num_key_value_heads": 1}
    path = tiny.save_decoder(tmp_path, "llama", head=False, head_dim=16, **overrides)
    config = tiny.decoder_config("llama", head_dim=16, **overrides)
    config.num_attention_heads = 3
    reference = tiny.spread(LlamaModel._from_config(config, attn_implementation="eager"), 0)
    save_file(reference.state_dict(), path / "model.safetensors")
    tiny.edit_json(path / "config.json", num_attention_heads=3)
    batch = sequences(70)
    expected = [reference(torch.tensor([ids])).last_hidden_state[0] for ids in batch]
    assert_states(load(path), batch, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_logits(tmp_path, kind, tied):
    path = tiny.save_decoder(tmp_path, kind, tie_word_embeddings=tied)
    model = load(path)
    assert model.lm is not None
    assert model.card.tasks == ("generate",)
    ids = sequences(70, (12,))[0]
    logits = model.lm.logits(model.lm(ragged([ids])[0]))
    wanted = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([ids])).logits[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=1e-5)


def test_the_embedding_is_scaled_by_a_rounded_factor(tmp_path):
    """sqrt(48) is 6.9282, which bfloat16 rounds to 6.9375."""
    path = tiny.save_decoder(tmp_path, "gemma", hidden_size=48)
    seen = []
    model = load(path, dtype="bfloat16")
    model.backbone.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.backbone(ragged([[5, 9]])[0])
    table = model.backbone.embedding(torch.tensor([5, 9]))
    torch.testing.assert_close(seen[0], table * torch.tensor(6.9375, dtype=torch.bfloat16))


def test_a_token_has_the_same_experts_in_any_batch(tmp_path):
    model = load(tiny.save_decoder(tmp_path, "qwen3_moe", num_experts=8, num_experts_per_tok=1))
    batch = sequences(70, (20, 3, 41))
    packed, cu = ragged(batch)
    together = model.backbone(packed).split(cu.diff().tolist())
    for ids, states in zip(batch, together, strict=True):
        alone = model.backbone(ragged([ids])[0])
        torch.testing.assert_close(alone, states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("mistral", {"layer_types": [FULL, SLIDING, SLIDING]}, "layer_types"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping"),
        ("gemma3_text", {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, kind, settings, named):
    path = tiny.save_decoder(tmp_path, kind)
    tiny.edit_json(path / "config.json", **settings)
    with pytest.raises(CheckpointError, match=named):
        load(path)
