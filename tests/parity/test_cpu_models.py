"""Whole models by the CPU kernels: against torch ops, and bit by bit against themselves.

What a token's hidden state is must depend neither on the batch, nor on chunks, nor on pages.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rose.kernels.attention import BACKENDS
from rose.kernels.cpu import load_library, replaced
from rose.models.decoder import DecoderLayer
from rose.models.encoder import EncoderLayer
from rose.models.layers import prepare
from rose.models.loader import LoadedModel, load
from tests import batches, tiny
from tests.batches import ragged, run_paged
from tests.parity.oracle import sequences

FUSED = {
    *("bert", "distilbert", "gte", "jina_bert", "mpnet", "nomic_bert", "roberta"),
    "xlm-roberta",
    *("gemma", "llama", "mistral", "phi3", "qwen2", "qwen3"),
}
WITH_EXPERTS = {"qwen3_moe"}
CACHED = sorted(tiny.DECODERS)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    if load_library() is None:
        pytest.skip("there are no CPU kernels here")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def save(path, kind, **overrides):
    write = tiny.save_encoder if kind in tiny.ENCODERS else tiny.save_decoder
    return write(path, kind, **overrides)


def prepared(path, quantization=None) -> LoadedModel:
    """Load a model as it is served."""
    loaded = load(path)
    for model in (loaded.lm, loaded.backbone):
        if isinstance(model, nn.Module):
            prepare(model, quantization)
    return loaded


def states_by_torch(path, texts):
    with replaced(None):
        batch, cu_seqlens = ragged(texts)
        return load(path).backbone(batch).split(cu_seqlens.diff().tolist())


def states_by_kernels(model: LoadedModel, texts, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(batches, "reference_backend", BACKENDS.load("cpu"))
        batch, cu_seqlens = ragged(texts)
    return model.backbone(batch).split(cu_seqlens.diff().tolist())


@pytest.mark.parametrize("kind", [*tiny.ENCODERS, *tiny.DECODERS])
def test_states_are_those_of_torch_whatever_the_batch(tmp_path, kind, monkeypatch):
    path = save(tmp_path, kind)
    model = prepared(path)
    texts = sequences(model.card.vocab_size, (1, 7, 2, 33, 16, 30))
    expected = states_by_torch(path, texts)
    together = states_by_kernels(model, texts, monkeypatch)
    for ids, state, wanted in zip(texts, together, expected, strict=True):
        torch.testing.assert_close(state, wanted, atol=5e-5, rtol=1e-5)
        [alone] = states_by_kernels(model, [ids], monkeypatch)
        assert torch.equal(state, alone)


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize("steps", [(1,), (40,), (9, 1, 3)], ids=str)
def test_states_do_not_depend_on_chunks_and_pages(tmp_path, kind, steps, monkeypatch):
    model = prepared(save(tmp_path, kind))
    texts = sequences(model.card.vocab_size, (1, 7, 2, 33, 16))
    whole = states_by_kernels(model, texts, monkeypatch)
    monkeypatch.setattr(batches, "reference_backend", BACKENDS.load("cpu"))
    for paged, state in zip(run_paged(model.backbone, texts, steps), whole, strict=True):
        if kind in WITH_EXPERTS:
            torch.testing.assert_close(paged, state, atol=5e-5, rtol=1e-5)
        else:
            assert torch.equal(paged, state)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("bert", {"hidden_act": "relu"}),
        ("bert", {"hidden_act": "tanh"}),
        ("bert", {"hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 50}),
        ("llama", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
        ("qwen3", {"head_dim": 40, "num_key_value_heads": 4}),
    ],
    ids=str,
)
def test_variants_of_layers(tmp_path, kind, overrides, monkeypatch):
    path = save(tmp_path, kind, **overrides)
    model = prepared(path)
    texts = sequences(model.card.vocab_size)
    together = states_by_kernels(model, texts, monkeypatch)
    for state, wanted in zip(together, states_by_torch(path, texts), strict=True):
        torch.testing.assert_close(state, wanted, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [*tiny.ENCODERS, *tiny.DECODERS])
def test_which_layers_are_one_kernel(tmp_path, kind):
    modules = prepared(save(tmp_path, kind)).backbone.modules()  # type: ignore[attr-defined]
    layers = [m for m in modules if isinstance(m, DecoderLayer | EncoderLayer)]
    if kind in FUSED:
        assert layers
        assert all(layer.block is not None for layer in layers)
    elif kind not in WITH_EXPERTS:  # which has a layer with an MLP
        assert all(layer.block is None for layer in layers)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_quantized_models_are_near(tmp_path, kind, monkeypatch):
    path = save(tmp_path, kind)
    texts = sequences(70 if kind == "llama" else 40)
    exact = torch.cat(states_by_kernels(prepared(path), texts, monkeypatch))
    rounded = torch.cat(states_by_kernels(prepared(path, "int8"), texts, monkeypatch))
    similarity = torch.cosine_similarity(exact, rounded)
    assert not torch.equal(exact, rounded)
    assert similarity.quantile(0.1) > 0.99


def test_a_block_leaves_other_attention_to_the_modules(tmp_path, monkeypatch):
    path = save(tmp_path, "llama")
    texts = sequences(70)
    batch, cu_seqlens = ragged(texts)  # attention by torch
    states = prepared(path).backbone(batch).split(cu_seqlens.diff().tolist())
    for state, wanted in zip(states, states_by_torch(path, texts), strict=True):
        torch.testing.assert_close(state, wanted, atol=5e-5, rtol=1e-5)


def test_tied_weights_are_held_once(tmp_path):
    path = save(tmp_path, "llama", tie_word_embeddings=True)
    plain, packed = load(path), prepared(path)
    assert packed.lm is not None
    assert list(packed.backbone.embedding.parameters()) == []  # type: ignore[attr-defined]
    ids = torch.tensor([3, 69, 0, 3])
    expected = plain.backbone.embedding(ids)  # type: ignore[attr-defined]
    assert torch.equal(packed.backbone.embedding(ids), expected)  # type: ignore[attr-defined]
    logits = packed.lm.logits(expected)
    torch.testing.assert_close(logits, plain.lm.logits(expected), atol=1e-5, rtol=1e-5)
    assert torch.equal(packed.lm.logits(expected[:1]), logits[:1])
