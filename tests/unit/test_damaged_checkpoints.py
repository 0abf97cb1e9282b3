"""Files of a checkpoint that are damaged, or odd in a way that only shows when they are used."""

import io
import json
import struct

import pytest
import torch

from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError
from rose.models.gguf import convert_gguf
from rose.models.gguf.reader import GgufFile
from rose.models.loader import load
from rose.models.tensors import _load_torch
from rose.models.tokenizer import read_tokenizer_json
from tests import tiny
from tests.unit.gguf_files import write_gguf


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return tiny.save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def folder(origin, tmp_path):
    return tiny.copy(origin, tmp_path / "model")


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_files_that_are_damaged_anywhere_are_named(tmp_path, zipped):
    """A damaged pickle fails in any way: it takes from an empty list, or calls what is no class."""
    whole = io.BytesIO()
    tensors = {"weight": torch.zeros(1, 4), "bias": torch.zeros(1)}
    torch.save(tensors, whole, _use_new_zipfile_serialization=zipped)
    data, file = whole.getvalue(), tmp_path / "sparse_linear.pt"
    reasons = []
    for at in range(0, len(data), 3):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            _load_torch(file)
        except CheckpointError as error:
            reasons.append(str(error))
    assert len(reasons) > 20
    assert all(reason.startswith(str(file)) for reason in reasons)
    assert not any("\n" in reason for reason in reasons if "refused" in reason)


@pytest.mark.parametrize("value", [["query"], {"query": 1}, 1, "query"])
def test_a_default_prompt_is_one_of_the_prompts(folder, value):
    tiny.edit_json(
        folder / "config_sentence_transformers.json",
        prompts={"document": "d: "},
        default_prompt_name=value,
    )
    with pytest.raises(CheckpointError, match="default_prompt_name"):
        load(folder)


def test_the_root_of_a_negative_number_is_refused(folder):
    tiny.edit_json(folder / "config.json", layer_norm_eps=-1e-12)
    with pytest.raises(CheckpointError, match="layer_norm_eps: must be at least 0, found -1e-12"):
        load(folder)


def test_an_integer_that_is_no_float_is_refused(folder):
    tiny.edit_json(folder / "config.json", layer_norm_eps=10**400)
    with pytest.raises(CheckpointError, match="layer_norm_eps: a number is expected"):
        load(folder)


@pytest.mark.parametrize("name", ["do_lower_case", "tokenize_chinese_chars", "strip_accents"])
@pytest.mark.parametrize("built", [False, True])
def test_options_of_the_tokenizer_of_bert_are_flags(folder, name, built):
    if built:  # of a vocabulary
        (folder / "vocab.txt").write_text("\n".join(tiny.bert_vocabulary()))
        (folder / "tokenizer.json").unlink()
    tiny.edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    plain = read_tokenizer_json(CheckpointFolder(folder))
    tiny.edit_json(folder / "tokenizer_config.json", **{name: None})
    assert read_tokenizer_json(CheckpointFolder(folder)) == plain
    tiny.edit_json(folder / "tokenizer_config.json", **{name: 1})
    with pytest.raises(CheckpointError, match=rf"{name}: true or false is expected, found 1"):
        read_tokenizer_json(CheckpointFolder(folder))


def test_a_vocabulary_that_is_no_text_is_named(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_bytes(b"\xff\xfe[UNK]\n[CLS]\n[SEP]\n")
    with pytest.raises(CheckpointError, match=r"vocab\.txt: not a usable vocabulary"):
        load(folder)


def test_metadata_of_gguf_files_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, "llama")
    whole = file.read_bytes()
    name = struct.pack("<Q", 5) + b"llama"
    assert whole.count(name) > 0
    file.write_bytes(whole.replace(name, struct.pack("<Q", 5) + b"ll\xffma", 1))
    with pytest.raises(CheckpointError, match=r"model\.gguf: metadata 'general\.architecture' is"):
        convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [True, float("nan"), float("inf")])
def test_metadata_of_gguf_files_is_of_finite_numbers(tmp_path, value):
    key = "llama.rope.freq_base"
    file = write_gguf(tmp_path / "model.gguf", "llama", settings={key: value})
    with pytest.raises(CheckpointError, match=rf"'{key}' should be float, but is"):
        GgufFile(file).require(key, float)


@pytest.mark.parametrize("prompts", [{"query": "\ud83d "}, {"\ud83d": "q: "}])
def test_half_a_character_is_refused_before_it_is_sent(folder, prompts):
    tiny.edit_json(folder / "config_sentence_transformers.json", prompts=prompts)
    with pytest.raises(CheckpointError, match=r"transformers\.json: malformed JSON: .*surrogates"):
        load(folder)


def test_half_a_character_is_no_path(folder):
    (folder / "modules.json").write_text(r'[{"type": "x.Transformer", "path": "\ud800"}]')
    with pytest.raises(CheckpointError, match=r"modules\.json: malformed JSON: .*surrogates"):
        load(folder)


def test_whole_characters_may_be_written_in_halves(folder):
    text = r'{"prompts": {"query": "\ud83e\udd99 "}}'
    (folder / "config_sentence_transformers.json").write_text(text)
    assert load(folder).card.embedding.prompts == {"query": "\U0001f999 "}


@pytest.mark.parametrize("kind", ["bert", "qwen3_moe"])
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_without_end_are_refused_before_they_are_made(folder, tmp_path, kind, key):
    if kind == "qwen3_moe":
        folder = tiny.save_decoder(tmp_path / "moe", kind)
    tiny.edit_json(folder / "config.json", **{key: 10**6})
    with pytest.raises(CheckpointError, match=rf"{key}: 1000000 is more than the 4096 experts"):
        load(folder)


def test_numbers_of_channels_that_are_no_numbers_are_refused(tmp_path):
    folder = tiny.save_decoder(tmp_path / "model", "phi3")
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"] | {"partial_rotary_factor": 1e308}
    tiny.edit_json(folder / "config.json", rope_parameters=rope)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor: 1e\+308 of a head"):
        load(folder)


@pytest.mark.parametrize("kind", [[], {}, 5, None])
def test_types_of_layers_are_names(tmp_path, kind):
    folder = tiny.save_encoder(tmp_path / "model", "modernbert")
    types = json.loads((folder / "config.json").read_text())["layer_types"]
    tiny.edit_json(folder / "config.json", layer_types=[*types[:-1], kind])
    with pytest.raises(CheckpointError, match="layer_types: one of"):
        load(folder)
