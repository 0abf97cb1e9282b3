"""Recipes against sentence-transformers: pooling, modules, limits and prompts, in both styles."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer

from rose.models.errors import CheckpointError
from rose.models.loader import LoadedModel, load
from rose.models.output import finish
from rose.runtime.options import EmbedOptions
from tests import tiny
from tests.batches import ragged

TEXTS = ["short", "a much longer text with many more words in it", "Kite", ""]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
OLD_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return tiny.save_bert(tmp_path_factory.mktemp("bert"))


def build(bert: Path, target: Path, *modules: nn.Module) -> SentenceTransformer:
    """Write a sentence-transformers folder and return the reference."""
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[st.Transformer(str(bert)), *modules], device="cpu")
    model.save(str(target), create_model_card=False)
    return model


def older_style(folder: Path) -> None:
    """Rewrite a folder as sentence-transformers before version 5 wrote it."""
    entries = json.loads((folder / "modules.json").read_text())
    for entry in entries:
        entry["type"] = "sentence_transformers.models." + entry["type"].rpartition(".")[2]
    (folder / "modules.json").write_text(json.dumps(entries))
    settings = {"max_seq_length": 40, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    pooling = folder / "1_Pooling" / "config.json"
    config = json.loads(pooling.read_text())
    modes = config["pooling_mode"]
    modes = [modes] if isinstance(modes, str) else modes
    flags = {flag: mode in modes for mode, flag in OLD_FLAGS.items()}
    pooling.write_text(
        json.dumps({"word_embedding_dimension": config["embedding_dimension"], **flags})
    )
    for file in ("config_sentence_transformers.json", "3_Normalize/config.json"):
        (folder / file).unlink(missing_ok=True)


def embed(model: LoadedModel, texts: list[str], prompt: str = "") -> np.ndarray:
    """Embed as the gateway and the runtime do."""
    tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
    assert tokenizer.truncation is None
    assert tokenizer.padding is None
    tokenizer.enable_truncation(model.card.max_model_len)
    batch, cu = ragged([tokenizer.encode(prompt + text).ids for text in texts])
    card = model.card.embedding
    assert card is not None
    skip = None
    if prompt and not card.pools_prompt:
        length = len(tokenizer.encode(prompt).ids) - 1  # without the closing special token
        skip = torch.full((len(texts),), length, dtype=torch.int32)
    vectors = model.embedding(batch, cu, skip)
    assert vectors.shape[1] == card.dimensions == model.embedding.dimensions
    return finish(vectors, EmbedOptions(), card.normalize)


def assert_same(folder: Path, texts: list[str] = TEXTS, **encode: object) -> LoadedModel:
    """ROSE's vectors are those of sentence-transformers, loaded from the same folder."""
    reference = SentenceTransformer(str(folder), device="cpu")
    model = load(folder)
    wanted = reference.encode(texts, **encode)
    found = embed(model, texts, str(encode.get("prompt", "")))
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-4)
    return model


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("mode", [*MODES, ("cls", "mean"), ("cls", "max", "mean", "lasttoken")])
def test_pooling_modes(bert, tmp_path, mode, older):
    build(bert, tmp_path, st.Pooling(32, mode))
    if older:
        older_style(tmp_path)
    model = assert_same(tmp_path)
    assert model.warnings == []
    assert model.card.embedding.dimensions == 32 * (1 if isinstance(mode, str) else len(mode))


def test_pooling_modes_are_joined_in_the_listed_order(bert, tmp_path):
    build(bert, tmp_path, st.Pooling(32, ("lasttoken", "max", "cls")))
    assert assert_same(tmp_path).card.embedding.pooling == "last+max+cls"


def test_old_flags_all_off_mean_the_mean(bert, tmp_path):
    build(bert, tmp_path, st.Pooling(32, "cls"))
    flags = dict.fromkeys(OLD_FLAGS.values(), False)
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    assert assert_same(tmp_path).card.embedding.pooling == "mean"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("include", [True, False])
def test_prompts_are_pooled_or_not(bert, tmp_path, mode, include):
    build(bert, tmp_path, st.Pooling(32, mode, include_prompt=include))
    texts = ["short", "a much longer text", "sea"]
    model = assert_same(tmp_path, texts, prompt="red kite: ")
    assert model.card.embedding.pools_prompt == include


CHAINS = {
    "normalize": lambda: [st.Normalize()],
    "dense": lambda: [st.Dense(32, 48), st.Normalize()],
    "two dense": lambda: [st.Dense(32, 8), st.Dense(8, 16, activation_function=nn.ReLU())],
    "no bias": lambda: [st.Dense(32, 24, bias=False, activation_function=nn.Identity())],
    "layer norm": lambda: [st.LayerNorm(32)],
    "normalize first": lambda: [st.Normalize(), st.Dense(32, 12)],
    "normalize twice": lambda: [st.Normalize(), st.Dense(32, 12), st.Normalize(), st.Normalize()],
    "dropout": lambda: [st.Dropout(0.5), st.Dense(32, 12), st.Dropout(0.1), st.Normalize()],
    "residual": lambda: [st.Dense(32, 32, use_residual=True)],
    "projected residual": lambda: [st.Dense(32, 20, use_residual=True), st.LayerNorm(20)],
    "activations": lambda: [
        st.Dense(32, 32, activation_function=kind())
        for kind in (nn.GELU, nn.SiLU, nn.Sigmoid, nn.ReLU, nn.Tanh)
    ],
    "more activations": lambda: [
        st.Dense(32, 32, activation_function=kind())
        for kind in (nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish, nn.Hardtanh, nn.Identity)
    ],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_modules(bert, tmp_path, chain):
    modules = CHAINS[chain]()
    for parameter in itertools.chain(*(module.parameters() for module in modules)):
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    build(bert, tmp_path, st.Pooling(32, "mean"), *modules)
    model = assert_same(tmp_path)
    ends = [m for m in modules if not isinstance(m, st.Dropout)]
    assert model.card.embedding.normalize == (bool(ends) and isinstance(ends[-1], st.Normalize))


def test_modules_in_folders_of_other_names_and_older_weights(bert, tmp_path):
    build(bert, tmp_path, st.Pooling(32, "mean"), st.Dense(32, 12))
    (tmp_path / "2_Dense").rename(tmp_path / "2_Dense_1024")
    entries = json.loads((tmp_path / "modules.json").read_text())
    entries[2]["path"] = "2_Dense_1024"
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    assert_same(tmp_path)
    dense = tmp_path / "2_Dense_1024"
    from safetensors.torch import load_file

    torch.save(load_file(dense / "model.safetensors"), dense / "pytorch_model.bin")
    (dense / "model.safetensors").unlink()
    assert_same(tmp_path)


def test_backbone_in_a_folder_of_its_own(bert, tmp_path):
    build(bert, tmp_path, st.Pooling(32, "mean"), st.Normalize())
    older_style(tmp_path)
    inner = tmp_path / "0_Transformer"
    inner.mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.move(tmp_path / file, inner / file)
    shutil.move(tmp_path / "sentence_bert_config.json", inner / "sentence_bert_config.json")
    entries = json.loads((tmp_path / "modules.json").read_text())
    entries[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    assert_same(tmp_path)


def test_no_modules(bert, tmp_path):
    path = tiny.copy(bert, tmp_path / "plain")
    model = assert_same(path)
    assert model.card.embedding.pooling == "mean"
    assert "modules.json" in model.warnings[0]
    decoder = tiny.save_decoder(tmp_path / "decoder", "qwen3", end=True, head=False)
    assert load(decoder).card.embedding.pooling == "last"
    tiny.edit_json(decoder / "config.json", is_causal=False)
    assert load(decoder).card.embedding.pooling == "mean"


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("mode", ["lasttoken", "mean", "weightedmean"])
@pytest.mark.parametrize("causal", [True, False])
def test_decoder_embedders(tmp_path, kind, mode, causal):
    # The end token, which is pooled, is the pad token too.
    path = tiny.save_decoder(tmp_path / "core", kind, end=True, head=False, is_causal=causal)
    target = tmp_path / "st"
    build(path, target, st.Pooling(32, mode), st.Normalize())
    texts = ["kite", "kite over sea", "a"]
    for side in ("left", "right"):
        reference = SentenceTransformer(
            str(target),
            device="cpu",
            processor_kwargs={"padding_side": side},
            model_kwargs={"attn_implementation": "eager"},
        )
        model = load(target)
        np.testing.assert_allclose(
            embed(model, texts), reference.encode(texts), atol=1e-5, rtol=1e-4
        )
    tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
    wanted = AutoTokenizer.from_pretrained(target)(texts).input_ids
    assert [tokenizer.encode(text).ids for text in texts] == wanted


LIMITS = {
    "as saved": {},
    "stated": {"settings": {"max_seq_length": 9}},
    "null": {"settings": {"max_seq_length": None}},
    "stated above the tokenizer's": {"settings": {"max_seq_length": 30}, "tokenizer": 7},
    "tokenizer's": {"settings": {"do_lower_case": False}, "tokenizer": 7},
    "sentinel": {"settings": {"max_seq_length": None}, "tokenizer": 1e30},
    "nothing": {"settings": {}, "tokenizer": ...},
    "argument": {"settings": {"max_seq_length": 9, "tokenizer_args": {"model_max_length": 12}}},
}


@pytest.mark.parametrize("case", LIMITS)
def test_maximum_length(bert, tmp_path, case):
    build(bert, tmp_path, st.Pooling(32, "mean"))
    limits = LIMITS[case]
    if "settings" in limits:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(limits["settings"]))
    if "tokenizer" in limits:
        tiny.edit_json(tmp_path / "tokenizer_config.json", model_max_length=limits["tokenizer"])
    baked = json.loads((tmp_path / "tokenizer.json").read_text())
    baked["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    baked["padding"] = {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(baked))
    model = assert_same(tmp_path, ["kite over sea " * count for count in (1, 3, 4, 9, 20)])
    reference = SentenceTransformer(str(tmp_path), device="cpu")
    assert model.card.max_model_len == reference.max_seq_length
    assert model.warnings == []


def test_maximum_length_beyond_the_table_is_clamped(bert, tmp_path):
    build(bert, tmp_path, st.Pooling(32, "mean"))
    tiny.edit_json(tmp_path / "sentence_bert_config.json", max_seq_length=512)
    model = load(tmp_path)
    assert model.card.max_model_len == 40
    assert "512" in model.warnings[0]
    assert load(tmp_path, max_model_len=8).card.max_model_len == 8
    assert load(tmp_path, max_model_len=40).warnings == []
    clamped = load(tmp_path, max_model_len=41)
    assert clamped.card.max_model_len == 40
    assert "41" in clamped.warnings[0]
    with pytest.raises(CheckpointError, match="max_model_len"):
        load(tmp_path, max_model_len=0)


def test_rotary_models_may_be_stretched(tmp_path):
    path = tiny.save_decoder(tmp_path / "core", "qwen3", end=True, head=False)
    build(path, tmp_path / "st", st.Pooling(32, "lasttoken"))
    tiny.edit_json(tmp_path / "st" / "sentence_bert_config.json", max_seq_length=300)
    model = assert_same(tmp_path / "st", ["kite " * 58])
    assert model.card.max_model_len == 300
    assert "300" in model.warnings[0]


def test_lowercase(bert, tmp_path):
    cased = tiny.copy(bert, tmp_path / "cased")
    tiny.bert_tokenizer(lowercase=False).save_pretrained(cased)
    build(cased, tmp_path / "st", st.Pooling(32, "mean"))
    settings = {"max_seq_length": 20, "do_lower_case": True}
    (tmp_path / "st" / "sentence_bert_config.json").write_text(json.dumps(settings))
    assert load(tmp_path / "st").card.tokenizer.lowercase
    tiny.edit_json(tmp_path / "st" / "sentence_bert_config.json", do_lower_case=False)
    assert not load(tmp_path / "st").card.tokenizer.lowercase


def test_prompts_and_widths(bert, tmp_path):
    build(bert, tmp_path, st.Pooling(32, "mean"), st.Normalize())
    file = tmp_path / "config_sentence_transformers.json"
    tiny.edit_json(
        file,
        prompts={"query": "q: ", "document": None},
        default_prompt_name="query",
        truncate_dim=16,
        matryoshka_dimensions=[32, 16, 8],
    )
    model = load(tmp_path)
    card = model.card.embedding
    assert card.prompts == {"query": "q: ", "document": ""}
    assert card.default_prompt_name == "query"
    assert card.matryoshka == (8, 16, 32)
    assert card.dimensions == 16
    reference = SentenceTransformer(str(tmp_path), device="cpu")
    wanted = reference.encode(TEXTS, normalize_embeddings=True, prompt="")
    np.testing.assert_allclose(embed(model, TEXTS), wanted, atol=1e-5)
    tiny.edit_json(file, default_prompt_name="title")
    with pytest.raises(CheckpointError, match=r"title.*document.*query"):
        load(tmp_path)
