"""Real checkpoints against the reference libraries."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose.models.loader import LoadedModel, load
from rose.models.output import finish
from rose.runtime.options import EmbedOptions
from tests import tiny
from tests.batches import ragged

MODELS = Path(__file__).parents[2] / ".models"
TEXTS = [
    "a red kite over the hill",
    "",
    "Málaga šíp ŽLUTÝ 東京 テスト",
    "query: how much protein should a female eat",
    *("alpha beta gamma delta " * count for count in (20, 60, 120, 300)),
]

pytestmark = pytest.mark.golden


def checkpoint(name: str) -> Path:
    path = MODELS / name
    if not path.is_dir():
        pytest.skip(f"{path} is not there")
    return path


@torch.inference_mode()
def embed(model: LoadedModel, texts: list[str]) -> np.ndarray:
    tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
    tokenizer.enable_truncation(model.card.max_model_len)
    batch, cu = ragged([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    return finish(model.embedding(batch, cu), EmbedOptions(), model.card.embedding.normalize)


@pytest.mark.parametrize(
    ("name", "limit"), [("all-MiniLM-L6-v2", 256), ("multilingual-e5-small", 512)]
)
def test_embedders(name, limit):
    path = checkpoint(name)
    model = load(path)
    assert model.warnings == []
    assert model.card.max_model_len == limit
    reference = SentenceTransformer(str(path), device="cpu", model_kwargs={"dtype": torch.float32})
    np.testing.assert_allclose(embed(model, TEXTS), reference.encode(TEXTS), atol=1e-5)


def test_vectors_do_not_depend_on_neighbours():
    model = load(checkpoint("all-MiniLM-L6-v2"))
    texts = ["a", "bb bb bb ", "c " * 250, "d " * 40]
    alone = np.concatenate([embed(model, [text]) for text in texts])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 3, 0, 2]):
        together = embed(model, [texts[index] for index in order])
        np.testing.assert_allclose(together, alone[order], atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"max_seq_length": None}, {"max_seq_length": 600}, None])
def test_maximum_length_of_minilm(tmp_path, settings):
    path = tmp_path / "model"
    source = checkpoint("all-MiniLM-L6-v2")
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).symlink_to(file)
    (path / "sentence_bert_config.json").unlink()
    if settings is not None:
        tiny.edit_json(path / "sentence_bert_config.json", **settings)
    model = load(path)
    assert model.card.max_model_len == 512
    asked_too_much = bool(settings) and settings["max_seq_length"] == 600
    assert bool(model.warnings) == asked_too_much
    reference = SentenceTransformer(str(path), device="cpu")
    reference.max_seq_length = min(reference.max_seq_length, 512)
    np.testing.assert_allclose(embed(model, TEXTS), reference.encode(TEXTS), atol=1e-5)


@torch.inference_mode()
def test_smollm2():
    path = checkpoint("SmolLM2-135M-Instruct")
    model = load(path)
    assert model.warnings == []
    assert model.card.tasks == ("generate",)
    assert model.card.generation.eos_token_ids == (2,)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("The capital of France is Paris, and that of Norway is").input_ids
    assert (
        Tokenizer.from_str(model.tokenizer_json.decode()).encode(tokenizer.decode(ids)).ids == ids
    )
    logits = model.lm.logits(model.lm(ragged([ids])[0]))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    wanted = reference(torch.tensor([ids])).logits[0]
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
    torch.testing.assert_close(logits, wanted, atol=2e-3, rtol=1e-4)
