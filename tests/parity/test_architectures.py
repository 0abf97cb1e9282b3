"""Every architecture from a tiny random checkpoint against transformers."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaModel

from rose.models.errors import CheckpointError
from rose.models.loader import LoadedModel, load
from rose.models.rotary import RotaryEmbedding
from tests import tiny
from tests.batches import new_pages, paged, ragged

LENGTHS = (1, 7, 2, 33, 16)


def sequences(vocab: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def reference_states(path: Path, batch: list[list[int]], **changes: object) -> list[Tensor]:
    """transformers' last hidden states, with some settings of the config changed."""
    config = AutoConfig.from_pretrained(path)
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModel.from_pretrained(path, config=config, attn_implementation="eager").eval()
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in batch]


def assert_states(
    model: LoadedModel, batch: list[list[int]], expected: list[Tensor], atol: float = 1e-5
) -> None:
    """Packed and one by one, ROSE's hidden states are the expected ones."""
    packed, cu = ragged(batch)
    states = model.backbone(packed).split(cu.diff().tolist())
    for ids, together, wanted in zip(batch, states, expected, strict=True):
        torch.testing.assert_close(together, wanted, atol=atol, rtol=1e-5)
        alone = model.backbone(ragged([ids])[0])
        torch.testing.assert_close(alone, together, atol=atol, rtol=1e-5)


def check(path: Path, lengths: tuple[int, ...] = LENGTHS, **load_options: object) -> LoadedModel:
    model = load(path, **load_options)
    batch = sequences(model.card.vocab_size, lengths)
    assert_states(model, batch, reference_states(path, batch))
    return model


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
        {"type_vocab_size": 1, "num_attention_heads": 1},
        {"num_hidden_layers": 1, "intermediate_size": 7, "hidden_act": "relu"},
    ],
)
def test_bert(tmp_path, overrides):
    check(tiny.save_bert(tmp_path, **overrides))


def test_bert_segment_ids(tmp_path):
    path = tiny.save_bert(tmp_path)
    ids, types = [2, 5, 6, 3, 7, 8, 3], [0, 0, 0, 0, 1, 1, 1]
    batch, _ = ragged([ids])
    batch = type(batch)(batch.input_ids, batch.positions, batch.attention, torch.tensor(types))
    reference = AutoModel.from_pretrained(path)
    wanted = reference(torch.tensor([ids]), token_type_ids=torch.tensor([types]))
    torch.testing.assert_close(
        load(path).backbone(batch), wanted.last_hidden_state[0], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind", list(tiny.DECODERS))
def test_decoder(tmp_path, kind):
    check(tiny.save_decoder(tmp_path, kind))


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
    ],
)
def test_decoder_variants(tmp_path, kind, overrides):
    check(tiny.save_decoder(tmp_path, kind, **overrides))


@pytest.mark.parametrize(
    ("kind", "window"),
    [("llama", None), ("qwen2", None), ("qwen2", 4), ("qwen3", None), ("qwen3", 4)],
)
def test_bidirectional_decoder(tmp_path, kind, window):
    overrides: dict[str, object] = {"is_causal": False}
    if window:
        overrides |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model = check(tiny.save_decoder(tmp_path, kind, **overrides))
    assert model.card.tasks == ("embed",)
    assert not model.backbone.attention_specs[0].causal


def test_bidirectional_by_the_other_key_and_by_option(tmp_path):
    path = tiny.save_decoder(tmp_path / "causal", "qwen3", head=False)
    by_key = tiny.copy(path, tmp_path / "key")
    tiny.edit_json(by_key / "config.json", use_bidirectional_attention=True)
    batch = sequences(70)
    expected = reference_states(path, batch, is_causal=False)
    assert_states(load(by_key), batch, expected)
    assert_states(load(path, bidirectional=True), batch, expected)
    assert_states(load(by_key, bidirectional=False), batch, reference_states(path, batch))


@pytest.mark.parametrize("kind", list(tiny.DECODERS))
@pytest.mark.parametrize("causal", [True, False])
def test_only_bidirectional_attention_sees_the_last_token_early(tmp_path, kind, causal):
    model = load(tiny.save_decoder(tmp_path, kind, is_causal=causal))
    first, second = (model.backbone(ragged([[5, 6, 7, last]])[0]) for last in (8, 9))
    assert torch.equal(first[:3], second[:3]) == causal


@pytest.mark.parametrize(
    ("kind", "sliding"), [("llama", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]
)
def test_paged_equals_ragged(tmp_path, kind, sliding):
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    model = load(tiny.save_decoder(tmp_path, kind, **(window if sliding else {})))
    batch = sequences(70, (9, 1, 14))
    packed, cu = ragged(batch)
    expected = model.backbone(packed).split(cu.diff().tolist())
    pages = new_pages(model.backbone.attention_specs, 13)
    rows = [[] for _ in batch]
    done = [0] * len(batch)
    for step in (1, 5, 1, 1, 7):  # a prefill in chunks, with decodes beside
        chunks = [(d, ids[d : d + step]) for d, ids in zip(done, batch, strict=True)]
        active = [index for index, (_, ids) in enumerate(chunks) if ids]
        states = model.backbone(_paged_of(pages, chunks, active, len(batch)))
        for index, part in zip(
            active, states.split([len(chunks[i][1]) for i in active]), strict=True
        ):
            rows[index].append(part)
            done[index] += len(part)
    for parts, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), wanted, atol=1e-5, rtol=1e-5)


def _paged_of(pages, chunks, active, count):
    """Only the active sequences are in the batch, but each keeps its own pages."""
    share = (pages.num_pages - 1) // count
    return paged(pages, [chunks[i] for i in active], [1 + share * i for i in active], share)


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


@pytest.mark.parametrize("kind", list(tiny.DECODERS))
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


def test_half_precision_is_close(tmp_path):
    path = tiny.save_decoder(tmp_path, "qwen3")
    batch, _ = ragged(sequences(70))
    exact, half = (load(path, dtype=d).backbone(batch) for d in ("float32", "bfloat16"))
    assert half.dtype == torch.bfloat16
    assert torch.cosine_similarity(exact, half.float()).min() > 0.99


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
