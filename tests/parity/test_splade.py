"""Sparse embedders (SPLADE): equal to sentence-transformers' SparseEncoder."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sentence_transformer import modules as st
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer

from rose.models.errors import CheckpointError
from rose.models.loader import load
from rose.serving.inspect import inspect_checkpoint
from tests import tiny
from tests.batches import ragged
from tests.parity.served import post

TEXTS = ["red kite over the sea", "a", "green tea", "short text longer words a a a"]
KINDS = ["bert", "distilbert", "roberta", "xlm-roberta"]


def save_sparse(target, kind, **pooling):
    core = tiny.save_encoder(target.parent / f"{target.name}-core", kind, head="masked_lm")
    modules = [st.Transformer(str(core), transformer_task="fill-mask"), SpladePooling(**pooling)]
    encoder = SparseEncoder(modules=modules, device="cpu")
    encoder.save(str(target), create_model_card=False)
    return encoder


def rows_of(model, texts, starts=None):
    tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
    batch, cu = ragged([tokenizer.encode(text).ids for text in texts])
    return model.embedding(batch, cu, starts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_weights_are_those_of_sparse_encoder(tmp_path, kind, strategy, activation):
    settings = {"pooling_strategy": strategy, "activation_function": activation}
    encoder = save_sparse(tmp_path / "model", kind, **settings)
    expected = encoder.encode(TEXTS, convert_to_sparse_tensor=False)
    model = load(tmp_path / "model")
    card = model.card.embedding
    assert card.outputs == ("sparse",)
    assert card.dimensions == model.card.vocab_size == expected.shape[1]
    assert not card.normalize
    found = rows_of(model, TEXTS)
    assert 0.05 < (expected > 0).float().mean() <= 1
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    alone = torch.cat([rows_of(model, [text]) for text in TEXTS])
    torch.testing.assert_close(alone, found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_leading_tokens_can_be_left_out(tmp_path, strategy):
    save_sparse(tmp_path / "model", "bert", pooling_strategy=strategy)
    model = load(tmp_path / "model")
    starts = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    pooler, hidden = model.embedding.pooling, []
    tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    batch, cu = ragged(ids)
    hidden = model.backbone(batch)
    expected = torch.cat(
        [
            pooler(
                hidden[cu[i] + starts[i] : cu[i + 1]],
                torch.tensor([0, len(row) - int(starts[i])]),
                None,
            )
            for i, row in enumerate(ids)
        ]
    )
    torch.testing.assert_close(model.embedding(batch, cu, starts), expected, atol=1e-6, rtol=1e-6)
    whole = pooler._pool(hidden, cu, starts)  # as on a GPU: all sequences in one piece
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)


def test_older_checkpoints_name_the_module_after_its_head(tmp_path):
    encoder = save_sparse(tmp_path / "model", "bert")
    entries = json.loads((tmp_path / "model" / "modules.json").read_text())
    entries[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    entries[1]["type"] = "sentence_transformers.sparse_encoder.models.SpladePooling"
    (tmp_path / "model" / "modules.json").write_text(json.dumps(entries))
    pooling = tmp_path / "model" / entries[1]["path"] / "config.json"
    tiny.edit_json(pooling, embedding_dimension=..., word_embedding_dimension=66)
    vocab = len(tiny.bert_vocabulary())
    with pytest.raises(CheckpointError, match=f"66 tokens, the vocabulary has {vocab}"):
        load(tmp_path / "model")
    tiny.edit_json(pooling, word_embedding_dimension=vocab)
    expected = encoder.encode(TEXTS, convert_to_sparse_tensor=False)
    torch.testing.assert_close(
        rows_of(load(tmp_path / "model"), TEXTS), expected, atol=2e-5, rtol=1e-4
    )


def test_inspect_tells_what_is_pooled(tmp_path):
    save_sparse(tmp_path / "model", "distilbert")
    report = inspect_checkpoint(str(tmp_path / "model"))
    settings = {setting.name: setting for setting in report.settings}
    assert settings["pooling"].value == "splade-max"
    assert settings["pooling"].source == "1_SpladePooling/config.json"
    assert report.dimensions == len(tiny.bert_vocabulary())


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, "pooling_strategy: 'mean'"),
        ("1_SpladePooling/config.json", {"activation_function": "gelu"}, "activation_function"),
        ("1_SpladePooling/config.json", {"top_k": 3}, "top_k"),
        ("config_sentence_transformers.json", {"max_active_dims": 8}, "max_active_dims"),
        ("config_sentence_transformers.json", {"model_type": "SentenceTransformer"}, "model_type"),
        (
            "sentence_bert_config.json",
            {"transformer_task": "feature-extraction"},
            "transformer_task",
        ),
    ],
)
def test_what_would_change_the_weights_is_refused(tmp_path, file, changes, message):
    save_sparse(tmp_path / "model", "bert")
    tiny.edit_json(tmp_path / "model" / file, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model")


def test_a_head_that_is_not_there_and_modules_in_another_order_are_refused(tmp_path):
    save_sparse(tmp_path / "model", "bert")
    headless = tiny.copy(tmp_path / "model", tmp_path / "headless")
    tiny.edit_tensors(
        headless, lambda all_: {n: t for n, t in all_.items() if not n.startswith("cls.")}
    )
    with pytest.raises(CheckpointError, match=r"cls\.predictions\.transform\.dense\.weight"):
        load(headless)
    entries = json.loads((tmp_path / "model" / "modules.json").read_text())
    normalize = {
        "idx": 2,
        "name": "2",
        "path": "",
        "type": "sentence_transformers.models.Normalize",
    }
    (tmp_path / "model" / "modules.json").write_text(json.dumps([*entries, normalize]))
    with pytest.raises(CheckpointError, match="a Transformer, then SpladePooling"):
        load(tmp_path / "model")


def test_architectures_without_a_known_head_are_refused(tmp_path):
    core = tiny.save_encoder(tmp_path / "core", "nomic_bert", head=None)
    tiny.edit_json(core / "1_SpladePooling.json")
    (core / "1").mkdir()
    tiny.edit_json(core / "1" / "config.json", pooling_strategy="max")
    types = ("Transformer", "SpladePooling")
    entries = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else "1",
            "type": f"sentence_transformers.models.{t}",
        }
        for i, t in enumerate(types)
    ]
    (core / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match="sparse embedders of nomic_bert"):
        load(core)


def test_numbers_are_finite_where_no_token_is_likely(tmp_path):
    save_sparse(tmp_path / "model", "bert")
    tiny.edit_tensors(
        tmp_path / "model",
        lambda all_: {n: t - 100 if n.endswith("predictions.bias") else t for n, t in all_.items()},
    )
    rows = rows_of(load(tmp_path / "model"), TEXTS).numpy()
    np.testing.assert_array_equal(rows, np.zeros_like(rows))


def test_over_http(tmp_path):
    encoder = save_sparse(tmp_path / "model", "bert")
    expected = encoder.encode(TEXTS, convert_to_sparse_tensor=False)
    (answer,) = post(tmp_path / "model", ("/embed_sparse", {"inputs": TEXTS}))
    assert answer.status_code == 200, answer.text
    for row, found in zip(expected, answer.json(), strict=True):
        dense = torch.zeros_like(row)
        for item in found:
            dense[item["index"]] = item["value"]
        torch.testing.assert_close(dense, row, atol=2e-5, rtol=1e-4)
        assert len(found) == int((row > 0).sum())
