"""The demo models, as fetched, in transformers and sentence-transformers."""

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.fetch_models import RECIPES, is_complete

pytestmark = pytest.mark.golden

MODELS = Path(__file__).resolve().parents[2] / ".models"
TRICKY = [
    "12345 and 1,000.50, 2024-02-29",
    "🙂 👩\u200d👩\u200d👧 🇪🇺 naïve café",
    "你好, 世界 こんにちは 안녕",
    "  two  spaces,\ttab\n\n  and the end ",
    "def f(x: int) -> int:\n    return x ** 2  # <|not_special|>",
    "Zero\u200bwidth, e\u0301 and \u00e9, \U0001f1e6",
]


def folder(name):
    path = MODELS / name
    if not path.is_dir():
        more = "" if name != "multilingual-e5-small" else " and tools/fetch_models.py --with-e5"
        pytest.skip(f"{path} is not there; `make models`{more} fetches it")
    return path


@pytest.fixture(scope="module")
def smollm2():
    return folder("SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def model(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", RECIPES)
def test_the_folder_is_what_the_recipe_makes(name):
    assert is_complete(folder(name), RECIPES[name])


def test_smollm2_knows_the_capital_of_france(model, tokenizer):
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(ids).logits[0, -1].argmax().item()
    assert tokenizer.decode(best) == " Paris"


def test_smollm2_chats_and_ends_its_turn(model, tokenizer):
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**ids, do_sample=False, max_new_tokens=24)[0]
    answer = tokenizer.decode(output[ids["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_smollm2_s_tokenizer_loses_nothing(smollm2, tokenizer):
    fast = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in TRICKY:
        ids = fast.encode(text).ids
        assert fast.decode(ids) == text
        assert tokenizer(text)["input_ids"] == ids


def test_smollm2_s_tokenizer_takes_digits_one_by_one(smollm2):
    fast = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert fast.encode("12345").ids == [33, 34, 35, 36, 37]
    assert fast.encode("<|im_start|>user").tokens == ["<|im_start|>", "user"]


def test_smollm2_s_special_tokens(smollm2, tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id == 2


def similarities(model, query, *texts):
    vectors = torch.from_numpy(model.encode([query, *texts], normalize_embeddings=True))
    assert torch.isfinite(vectors).all()
    return (vectors[1:].float() @ vectors[0].float()).tolist()


def test_minilm_embeds():
    model = SentenceTransformer(str(folder("all-MiniLM-L6-v2")), device="cpu")
    assert (model.max_seq_length, model.get_embedding_dimension()) == (256, 384)
    near, far = similarities(model, "A man eats pasta.", "Someone is eating food.", "It rains.")
    assert near == pytest.approx(0.5749, abs=2e-4)
    assert far == pytest.approx(0.0169, abs=2e-4)


def test_e5_embeds_across_languages():
    path = folder("multilingual-e5-small")
    model = SentenceTransformer(str(path), device="cpu")
    assert model.prompts["query"] == "query: "
    near, far = similarities(
        model, "query: How is the weather?", "passage: Das Wetter ist schön.", "passage: 我喜欢猫。"
    )
    assert near > far + 0.05
    tokens = model.tokenizer.tokenize("12345 你好")
    assert tokens == ["▁12", "345", "▁", "你好"]
