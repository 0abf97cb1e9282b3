"""tokenizer.json and the facts beside it."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError
from rose.models.tokenizer import gives_segment_ids, read_tokenizer_card, read_tokenizer_json
from tests import tiny

TEXTS = [
    "Kraków",
    "Krakow",
    "Málaga šíp ŽLUTÝ",
    "GRÖSSE größe",
    "東京 テスト",
    "a\u200bb c\u0000d",
    "öx",
    "İzmir",
    "ﬂour",
    "y" * 200,
    "kite [SEP] over [MASK]sea",
    "",
    "  \n\t ",
    "red-kite's \ud7ff \U0001f680",
]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    tiny.bert_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_str(read_tokenizer_json(CheckpointFolder(folder)).decode())


def assert_same_ids(folder: Path, texts: list[str] = TEXTS) -> None:
    mine, reference = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in texts:
        assert mine.encode(text).ids == reference(text).input_ids, text


CLASSES = [
    "BertTokenizer",
    "BertTokenizerFast",
    "DistilBertTokenizer",
    "DistilBertTokenizerFast",
    "MPNetTokenizer",
    "TokenizersBackend",
]


@pytest.mark.parametrize("kind", [..., *CLASSES])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "tokenize_chinese_chars": False},
    ],
    ids=str,
)
def test_ids_are_those_of_transformers(folder, kind, options):
    tiny.edit_json(folder / "tokenizer_config.json", tokenizer_class=kind, **options)
    assert_same_ids(folder)


NEW = {"content": "<new>", "lstrip": True, "normalized": False, "special": False}


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"69": {"content": "<other>"}, "68": NEW}},
        {"added_tokens_decoder": {"70": {**NEW, "normalized": True}}},
        {"additional_special_tokens": ["<new>", "<other>"]},
        {"extra_special_tokens": {"image_token": "<new>"}},
        {"extra_special_tokens": ["<new>"]},
        {"pad_token": "<new>"},
        {"bos_token": "<new>", "eos_token": "kite"},
    ],
    ids=str,
)
def test_tokens_that_the_config_alone_knows(folder, config):
    tiny.edit_json(folder / "tokenizer_config.json", **config)
    assert_same_ids(folder, ["kite <new> sea<other>", "a<new>b", "[NEW] [SEP]", "kites"])
    assert load(folder).token_to_id("<new>") is not None


@pytest.mark.parametrize("value", [{"a": NEW}, {"1": "x"}, {"1": {}}, {"1": {"content": 5}}])
def test_malformed_added_tokens(folder, value):
    tiny.edit_json(folder / "tokenizer_config.json", added_tokens_decoder=value)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        load(folder)


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "nomic_bert", "roberta"])
@pytest.mark.parametrize("kind", [..., *CLASSES])
def test_segments_are_told_by_the_class_of_the_tokenizer(folder, model_type, kind):
    tiny.edit_json(folder / "config.json", model_type=model_type)
    tiny.edit_json(folder / "tokenizer_config.json", tokenizer_class=kind)
    if (model_type, kind) == ("roberta", ...):
        return  # transformers would build another tokenizer of this vocabulary
    reference = AutoTokenizer.from_pretrained(folder)("kite", "sea")
    assert gives_segment_ids(CheckpointFolder(folder)) == ("token_type_ids" in reference)
    for names in (["input_ids"], ["input_ids", "token_type_ids"]):
        tiny.edit_json(folder / "tokenizer_config.json", model_input_names=names)
        assert gives_segment_ids(CheckpointFolder(folder)) == ("token_type_ids" in names)


def test_random_text(folder):
    rng = random.Random(0)
    points = [*range(32, 0x250), *range(0x300, 0x370), *range(0x4E00, 0x4E20), 0x1F680, 0x200B, 0]
    texts = ["".join(map(chr, rng.choices(points, k=rng.randrange(30)))) for _ in range(300)]
    assert_same_ids(folder, texts)


def test_saved_truncation_and_padding_are_taken_out(folder):
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    backend.save(str(folder / "tokenizer.json"))
    ids = load(folder).encode("the red kite over the sea").ids
    assert len(ids) == 8


@pytest.mark.parametrize("options", [{}, {"do_lower_case": False}, {"strip_accents": False}])
def test_vocabulary_without_tokenizer_json(folder, options):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(tiny.bert_vocabulary()) + "\n")
    tiny.edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", **options)
    assert_same_ids(folder)
    mine, reference = load(folder), AutoTokenizer.from_pretrained(folder)
    pair = mine.encode("red kite", "over sea")
    wanted = reference("red kite", "over sea")
    assert pair.ids == wanted.input_ids
    assert pair.type_ids == wanted.token_type_ids
    assert mine.decode(pair.ids) == "red kite over sea"


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing.*save_pretrained"):
        load(folder)
    (folder / "vocab.txt").write_text("a\n")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load(folder)


def test_a_vocabulary_without_special_tokens_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("kite\nsea\n")
    with pytest.raises(CheckpointError, match=r"vocab\.txt.*\[UNK\]"):
        load(folder)


@pytest.mark.parametrize("content", ["", "{}", "{", "[]", '{"model": {"type": "Magic"}}'])
def test_damaged_tokenizers(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load(folder)


# --- the card --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel", "Unigram", "BPE"])
def test_a_tokenizer_that_fails_on_unknown_letters_is_refused(folder, kind):
    values = {
        "WordPiece": models.WordPiece({"a": 0}, unk_token="[UNK]"),
        "WordLevel": models.WordLevel({"a": 0}, unk_token="[UNK]"),
        "Unigram": models.Unigram([("a", 0.0)]),
        "BPE": models.BPE({"a": 0}, [], unk_token="[UNK]"),
    }
    (folder / "tokenizer.json").write_text(Tokenizer(values[kind]).to_str())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: model: unk_token: "):
        read_tokenizer_json(CheckpointFolder(folder))


@pytest.mark.parametrize("model", [models.WordPiece(unk_token="[UNK]"), models.BPE()])
def test_a_tokenizer_without_tokens_is_refused(folder, model):
    (folder / "tokenizer.json").write_text(Tokenizer(model).to_str())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: model: vocab: it is empty"):
        read_tokenizer_json(CheckpointFolder(folder))


def card(folder: Path):
    return read_tokenizer_card(CheckpointFolder(folder))


def test_special_tokens(folder):
    assert card(folder).special_tokens == {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    }
    tiny.edit_json(
        folder / "tokenizer_config.json",
        pad_token={"content": "<pad>", "lstrip": False},
        cls_token=None,
        sep_token=...,
    )
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"sep_token": {"content": "<sep>"}, "pad_token": "<other>"})
    )
    tokens = card(folder).special_tokens
    assert (tokens["pad_token"], tokens["sep_token"]) == ("<other>", "<sep>")  # the older file wins
    assert "cls_token" not in tokens


def save_templates(folder: Path, chat_template: object) -> PreTrainedTokenizerFast:
    tokenizer = tiny.bert_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_no_chat_template(folder):
    assert card(folder).chat_templates == {}


def test_chat_template_in_a_file_of_its_own(folder):
    save_templates(folder, "{{ 'file' }}")
    assert (folder / "chat_template.jinja").exists()
    assert card(folder).chat_templates == {"default": "{{ 'file' }}"}
    tiny.edit_json(folder / "tokenizer_config.json", chat_template="{{ 'config' }}")
    assert card(folder).chat_templates == {"default": "{{ 'file' }}"}
    assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ 'file' }}"


def test_chat_template_in_the_config_alone(folder):
    tiny.edit_json(folder / "tokenizer_config.json", chat_template="{{ 'config' }}")
    assert card(folder).chat_templates == {"default": "{{ 'config' }}"}


def test_named_chat_templates(folder):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tiny.edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert card(folder).chat_templates == {"default": "d", "tool_use": "t"}
    tiny.edit_json(folder / "tokenizer_config.json", chat_template={"default": "x", "rag": "r"})
    assert card(folder).chat_templates == {"default": "x", "rag": "r"}
    save_templates(folder, {"default": "d", "tool_use": "t"})
    assert (folder / "additional_chat_templates" / "tool_use.jinja").exists()
    assert card(folder).chat_templates == {"default": "d", "tool_use": "t"}


@pytest.mark.parametrize("value", [3, ["x"], [{"name": "a"}], [{"template": "a"}], {"a": 1}])
def test_malformed_chat_templates(folder, value):
    tiny.edit_json(folder / "tokenizer_config.json", chat_template=value)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        card(folder)
