"""`rose inspect` says what the headers of the weights show to be unfit."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from rose.models.errors import CheckpointError
from rose.models.loader import load
from rose.serving import cli
from rose.serving.inspect import inspect_checkpoint
from tests.tiny import (
    DECODERS,
    ENCODERS,
    copy,
    edit_json,
    edit_tensors,
    save_bert,
    save_decoder,
    save_encoder,
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("models") / "tiny")


def rose(*arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return caught.value.code


def test_inspect_says_what_it_checked(bert, tmp_path, capsys):
    assert rose("inspect", bert) == 0
    assert "Names and shapes of the weights fit the config" in capsys.readouterr().out
    path = copy(bert, tmp_path / "old")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert rose("inspect", path) == 0
    assert "Weights in PyTorch files are checked when they are loaded" in capsys.readouterr().out


QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != QUERY}, f"tensor '{QUERY}' is missing from"),
        (lambda t: t | {QUERY: t[QUERY][:16].clone()}, rf"'{QUERY}' .*has shape \[16, 32\]"),
        (lambda t: t | {"encoder.layer.1.extra": torch.ones(2)}, "'encoder.layer.1.extra' of"),
    ],
)
def test_inspect_finds_what_loading_would(bert, tmp_path, capsys, change, message):
    path = copy(bert, tmp_path / "bad")
    edit_tensors(path, change)
    assert rose("inspect", path) == 1
    found = capsys.readouterr().err
    assert re.search(message, found)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert found == f"error: {caught.value}\n"


def test_inspect_finds_an_lm_head_that_cannot_be_the_embedding(tmp_path, capsys):
    folder = save_decoder(tmp_path / "model", "llama", tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    edit_tensors(folder, lambda t: t | {"lm_head.weight": t[embedding][:16].clone()})
    assert rose("inspect", folder) == 1
    found = capsys.readouterr().err
    assert re.search(r"'lm_head\.weight' .*has shape \[16, \d+\]", found)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert found.endswith(f"error: {caught.value}\n")


@pytest.mark.parametrize("head", ["masked_lm", "classifier"])
def test_inspect_finds_a_missing_part_of_a_head(tmp_path, capsys, head):
    folder = save_encoder(tmp_path / "model", "bert", head=head)
    assert rose("inspect", folder) == 0, capsys.readouterr().err
    if head == "classifier":
        edit_tensors(folder, lambda t: {k: v for k, v in t.items() if k != "classifier.bias"})
        assert rose("inspect", folder) == 1
        assert "classifier.bias' is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 60}, r"no tensor has the shape \[60, 32\] of the token embedding"),
        ({"max_position_embeddings": 41}, r"no tensor has the shape \[41, 32\] of the position"),
        ({"num_hidden_layers": 3}, "asks for 3 layers, .*model.safetensors holds tensors of 2"),
        ({"num_hidden_layers": 1}, "asks for 1 layers, .*model.safetensors holds tensors of 2"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers: 1099511627776 is more than the"),
    ],
)
def test_inspect_compares_config_and_headers(bert, tmp_path, capsys, changes, message):
    path = copy(bert, tmp_path / "bad")
    edit_json(path / "config.json", **changes)
    assert rose("inspect", path) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS])
def test_inspect_finds_nothing_wrong_with_what_loads(tmp_path, kind, capsys):
    save = save_encoder if kind in ENCODERS else save_decoder
    assert rose("inspect", save(tmp_path / "model", kind)) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [0, 4096]}, "safetensors: the safetensors header is damaged: tensors ov"),
        ({"data_offsets": [0, 4092]}, r"has 4092 bytes, its shape \[32, 32\] asks for 4096"),
        ({"data_offsets": [4096]}, "the safetensors header is damaged"),
        ({"dtype": "F16"}, r"has 4096 bytes, its shape \[32, 32\] asks for 2048"),
        ({"shape": [32, 33]}, r"has 4096 bytes, its shape \[32, 33\] asks for 4224"),
    ],
)
def test_inspect_sees_headers_that_lie(bert, tmp_path, capsys, change, message):
    path = copy(bert, tmp_path / "bad")
    file = path / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    entries["encoder.layer.0.attention.self.query.weight"] |= change
    header = json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    assert rose("inspect", path) == 1
    assert re.search(message, capsys.readouterr().err)


def test_inspect_sees_damaged_weights(bert, tmp_path, capsys):
    path = copy(bert, tmp_path / "bad")
    query = "encoder.layer.0.attention.self.query.weight"
    edit_tensors(path, lambda t: t | {query: t[query].to(torch.int8)})
    assert rose("inspect", path) == 1
    assert f"tensor '{query}' of {path / 'model.safetensors'} is of" in capsys.readouterr().err
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 9)
    assert rose("inspect", path) == 1
    assert "model.safetensors: the file is cut off: it has" in capsys.readouterr().err


def test_inspect_shows_how_text_is_generated(tmp_path):
    folder = save_decoder(tmp_path / "llm", "llama")
    edit_json(folder / "generation_config.json", eos_token_id=[0, 2], top_p=0.9, temperature=None)
    settings = {s.name: (s.value, s.source) for s in inspect_checkpoint(str(folder)).settings}
    assert settings["eos_token_id"] == ((0, 2), "generation_config.json")
    assert settings["top_p"] == (0.9, "generation_config.json")
    assert "temperature" not in settings
    edit_json(folder / "generation_config.json", eos_token_id=..., repetition_penalty=0)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: repetition_penalty"):
        inspect_checkpoint(str(folder))
