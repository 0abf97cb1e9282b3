"""Tokens from the files beside tokenizer.json: which file counts, and with which flags."""

import json
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from rose.models.added_tokens import special_tokens
from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError
from rose.models.tokenizer import load_tokenizer, read_tokenizer_card, read_tokenizer_json
from rose.serving.gateway.tokenization import Tokenizer
from tests import tiny

NEW = {"content": "<new>", "lstrip": True, "rstrip": True, "normalized": False, "special": True}
END = {"content": "<end>", "lstrip": True, "rstrip": True, "normalized": False, "special": True}
TEXTS = ("kite <new> over", "kite <end> Sea", "<new><end>", "a <bos>  b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tiny.decoder_tokenizer(end=True).save_pretrained(tmp_path)
    return tmp_path


def write(path: Path, **values: object) -> None:
    path.write_text(json.dumps(values))


def assert_like_transformers(folder: Path) -> None:
    expected = AutoTokenizer.from_pretrained(folder)
    source = CheckpointFolder(folder)
    backend = tokenizers.Tokenizer.from_buffer(read_tokenizer_json(source))
    found = Tokenizer(backend, read_tokenizer_card(source))
    for text, ids in zip(TEXTS, found.encode(TEXTS), strict=True):
        assert ids.tolist() == expected(text).input_ids, text


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"0": END}},
        {"added_tokens_decoder": {"0": END, "68": NEW}},
        {"added_tokens_decoder": {"0": {**END, "special": False}}},
        {"mask_token": {"__type": "AddedToken", **NEW}},
        {"split_special_tokens": True},
    ],
)
def test_flags_of_tokens_are_followed(folder: Path, config: dict[str, object]) -> None:
    tiny.edit_json(folder / "tokenizer_config.json", **config)
    assert_like_transformers(folder)


def test_older_files_count_without_a_list(folder: Path) -> None:
    write(folder / "special_tokens_map.json", eos_token="<last>", mask_token=NEW)
    assert special_tokens(CheckpointFolder(folder))["eos_token"] == "<last>"
    assert_like_transformers(folder)


def test_older_files_do_not_count_beside_a_list(folder: Path) -> None:
    write(folder / "special_tokens_map.json", eos_token="<last>")
    write(folder / "added_tokens.json", **{"<new>": 68})
    tiny.edit_json(folder / "tokenizer_config.json", added_tokens_decoder={"0": END})
    assert special_tokens(CheckpointFolder(folder))["eos_token"] == "<end>"
    assert_like_transformers(folder)


def test_added_tokens_json_is_read_by_id(folder: Path) -> None:
    size = load_tokenizer(CheckpointFolder(folder)).get_vocab_size()
    write(folder / "added_tokens.json", **{"<later>": size + 1, "<new>": size})
    assert load_tokenizer(CheckpointFolder(folder)).token_to_id("<new>") == size
    assert_like_transformers(folder)


def test_added_tokens_json_holds_ids(folder: Path) -> None:
    write(folder / "added_tokens.json", **{"<new>": "68"})
    with pytest.raises(CheckpointError, match=r"added_tokens\.json: <new>: an id is expected"):
        load_tokenizer(CheckpointFolder(folder))


def test_extra_tokens_with_names_are_known_to_templates(folder: Path) -> None:
    tiny.edit_json(folder / "tokenizer_config.json", extra_special_tokens={"image_token": "<new>"})
    expected = AutoTokenizer.from_pretrained(folder)
    expected.chat_template = "{{ image_token }}{{ eos_token }}"
    names = special_tokens(CheckpointFolder(folder))
    assert names["image_token"] + names["eos_token"] == expected.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False
    )
    assert_like_transformers(folder)
