"""The command line: help, mistakes, and the commands that load no model."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from rose import __version__
from rose.models.registry import ARCHITECTURES
from rose.serving import cli
from rose.serving.commands import chat
from rose.serving.offline.embed import EmbedFile
from rose.serving.offline.generate import GenerateFile
from rose.serving.offline.rerank import RerankFile
from tests.tiny import copy, edit_json, save_bert, save_decoder

ROOT = typer.main.get_command(cli.app)
COMMANDS = ROOT.commands
HEAVY = {"torch", "pyarrow", "tokenizers", "numpy", "starlette", "zmq", "safetensors"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("models") / "tiny")


def rose(*arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return caught.value.code


def imported_by(*arguments, code=0):
    """Run the command line in a process of its own and return what it has imported."""
    program = (
        "import sys, atexit\n"
        "from rose.serving.cli import main\n"
        "atexit.register(lambda: print('\\n' + ' '.join(sys.modules)))\n"
        f"main({[str(a) for a in arguments]!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


# Help and mistakes


def test_help_imports_nothing_that_takes_time():
    assert not imported_by("--help") & HEAVY


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_explained(name, capsys):
    assert rose(name, "--help") == 0
    assert f"rose {name}" in capsys.readouterr().out
    command = COMMANDS[name]
    assert command.help
    assert [p.name for p in command.params if not p.hidden and not p.help] == []


def commands(command, path=()):
    """Every command with its names, those of `rose bench` too."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize(
    ("path", "command"),
    [pytest.param(*each, id=" ".join(each[0])) for each in commands(ROOT)],
)
def test_no_name_of_an_option_is_cut_in_a_narrow_terminal(path, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert rose(*path, "--help") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) == 80
    names = [name for p in command.params if not p.hidden for name in (*p.opts, *p.secondary_opts)]
    options = [name for name in names if name.startswith("-")]
    assert [name for name in options if not re.search(rf"(?<!\S){name}(?![-\w])", shown)] == []


def test_embed_teaches_by_example(capsys):
    assert rose("embed", "--help") == 0
    assert "rose embed ./all-MiniLM-L6-v2 texts.txt -o vectors.npy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "embed",
            "--output -o --column --keep --prompt-name --prompt --truncate --dimensions "
            "--normalize --no-normalize --output-dtype --device --dtype --quantization --attention "
            "--max-model-len --max-batch-tokens --deterministic --force --restart --chunk-size "
            "--log-level",
        ),
        ("inspect", "--task --max-model-len --quantization --json --graphs --keys --picture"),
        ("models", "--json"),
    ],
)
def test_flags_do_not_change_unnoticed(name, flags):
    options = [p for p in COMMANDS[name].params if p.param_type_name == "option"]
    found = [flag for p in options for flag in (*p.opts, *p.secondary_opts)]
    assert found == flags.split()


@pytest.mark.parametrize(
    ("name", "job"), [("embed", EmbedFile), ("generate", GenerateFile), ("rerank", RerankFile)]
)
def test_commands_on_files_have_the_defaults_of_their_jobs(name, job):
    params = {p.name: p for p in COMMANDS[name].params}
    params["input"] = params.pop("input_file")
    for field in dataclasses.fields(job):
        if field.default is not dataclasses.MISSING:
            assert (params[field.name].default or None) == (field.default or None), field.name
    assert params.keys() - {f.name for f in dataclasses.fields(job)} == {"log_level"}


def test_the_version(capsys):
    assert rose("--version") == 0
    assert capsys.readouterr().out == f"rose {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["embed"], ["embed", "m", "i"], ["serve", "-x"]]
)
def test_a_wrong_command_line_is_exit_code_2(arguments, capsys):
    assert rose(*arguments) == 2
    assert "Usage: rose" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["float64", ""])
def test_a_wrong_choice_lists_the_right_ones(value, capsys):
    assert rose("embed", "m", "a.txt", "-o", "a.npy", "--output-dtype", value) == 2
    assert "'float16'" in capsys.readouterr().err


def test_a_mistake_is_one_line_and_exit_code_1(tmp_path, capsys):
    for command in (["inspect", tmp_path], ["embed", tmp_path, "no.txt", "-o", "a.npy"]):
        assert rose(*command) == 1
        assert capsys.readouterr().err.startswith("error: ")


# rose models


def test_models_lists_the_registry(capsys):
    assert rose("models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["architecture", "tasks"]
    assert [line.split()[0] for line in lines[1:-1]] == list(ARCHITECTURES)
    assert "late-interaction" in lines[-1]
    assert rose("models", "--json") == 0
    tasks = json.loads(capsys.readouterr().out)
    assert tasks["bert"] == ["embed", "score", "classify"]
    assert tasks["qwen3"] == ["embed", "generate", "score", "classify"]


# rose inspect


def report_of(path, capsys, *options):
    capsys.readouterr()
    assert rose("inspect", path, "--json", *options) == 0
    return json.loads(capsys.readouterr().out)


def add_recipe(path, *extra):
    """Make a sentence-transformers model of a checkpoint, with a Dense module of 8 outputs."""
    modules = ["Transformer", "Pooling", *extra]
    prefix = "sentence_transformers.models."
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": prefix + kind}
        for i, kind in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    for entry in entries[1:]:
        (path / entry["path"]).mkdir()
    edit_json(path / "1_Pooling" / "config.json", pooling_mode_cls_token=True)
    if "Dense" in extra:
        torch.save({"linear.weight": torch.ones(8, 32)}, path / "2_Dense" / "pytorch_model.bin")
        edit_json(path / "2_Dense" / "config.json", in_features=32, out_features=8, bias=False)
    return path


def test_inspect_tells_settings_with_their_sources(bert, capsys):
    report = report_of(bert, capsys)
    sources = {s["name"]: (s["value"], s["source"]) for s in report["settings"]}
    assert sources["architecture"] == ("bert", "config.json: model_type")
    assert sources["hidden_size"] == (32, "config.json")
    assert sources["max_model_len"] == (40, "config.json")
    assert sources["pooling"] == ("mean", "default of bidirectional models")
    assert sources["cls_token"] == ("[CLS]", "tokenizer_config.json")
    assert report["path"] == str(bert)
    assert report["tasks"] == ["embed"]
    assert report["dimensions"] == 32
    assert any("no modules.json" in warning for warning in report["warnings"])


def test_inspect_tells_of_the_weights(bert, capsys):
    report = report_of(bert, capsys)
    (file,) = report["weights"]
    assert file["file"] == "model.safetensors"
    assert file["bytes"] == (bert / "model.safetensors").stat().st_size
    assert file["dtypes"] == {"F32": file["tensors"]}
    assert report["parameters"] * 4 < file["bytes"] < report["parameters"] * 4 + 10_000


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_inspect_counts_no_scales(tmp_path, capsys, quantization):
    path = save_decoder(tmp_path / "llm", "qwen3")
    whole = report_of(path, capsys)["parameters"]
    rounded = tmp_path / "rounded"
    cli.app(
        ["convert", str(path), str(rounded), "--quantization", quantization], standalone_mode=False
    )
    capsys.readouterr()
    assert report_of(rounded, capsys)["parameters"] == whole


@pytest.mark.parametrize(
    ("before", "normalizer", "shown"),
    [
        (None, True, (True, "the tokenizer's normalizer")),
        (False, True, (True, "the tokenizer's normalizer")),
        (False, False, (False, "the tokenizer's normalizer")),
        (True, False, (True, "sentence_bert_config.json")),
    ],
)
def test_inspect_says_what_becomes_of_capitals(bert, tmp_path, capsys, before, normalizer, shown):
    path = add_recipe(copy(bert, tmp_path / "st"))
    settings = {} if before is None else {"do_lower_case": before}
    edit_json(path / "sentence_bert_config.json", max_seq_length=30, **settings)
    options = {"tokenizer_class": "BertTokenizer", "do_lower_case": normalizer}
    edit_json(path / "tokenizer_config.json", **options)
    found = [s for s in report_of(path, capsys)["settings"] if s["name"] == "do_lower_case"]
    assert [(s["value"], s["source"]) for s in found] == [shown]


def test_inspect_follows_the_recipe(bert, tmp_path, capsys):
    path = add_recipe(copy(bert, tmp_path / "st"), "Dense", "Normalize")
    report = report_of(path, capsys)
    sources = {s["name"]: (s["value"], s["source"]) for s in report["settings"]}
    assert sources["pooling"] == ("cls", "1_Pooling/config.json")
    assert sources["normalize"] == (True, "modules.json")
    assert report["dimensions"] == 8
    assert report["warnings"] == []
    assert [file["file"] for file in report["weights"]] == [
        "model.safetensors",
        "2_Dense/pytorch_model.bin",
    ]
    assert report["weights"][1]["tensors"] is None
    assert report["parameters"] is None


def test_inspect_honours_the_options(tmp_path, capsys):
    path = save_decoder(tmp_path / "llm", "qwen3")
    assert report_of(path, capsys)["tasks"] == ["generate"]
    report = report_of(path, capsys, "--task", "embed", "--max-model-len", 77)
    assert report["tasks"] == ["embed"]
    assert report["max_model_len"] == 77
    sources = {s["name"]: s["source"] for s in report["settings"]}
    assert sources["max_model_len"] == "option --max-model-len"


def test_inspect_prints_a_table(bert, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = add_recipe(copy(bert, tmp_path / "st"), "Normalize")
    edit_json(
        path / "config_sentence_transformers.json",
        prompts={"query": "find [red]: ", "none": ""},
        default_prompt_name="none",
    )
    assert rose("inspect", path) == 0
    out = capsys.readouterr().out
    words = [line.split() for line in out.splitlines()]
    assert ["setting", "value", "source"] in words
    assert ["max_model_len", "40", "config.json"] in words
    assert ["normalize", "True", "modules.json"] in words
    assert "query: 'find [red]: '" in out
    assert any(line[:1] == ["model.safetensors"] and line[2] == "F32" for line in words)
    assert rose("inspect", bert) == 0
    assert "warning: the checkpoint has no modules.json" in capsys.readouterr().out


def test_inspect_loads_torch_only_after_the_quick_checks(bert, tmp_path):
    path = copy(bert, tmp_path / "bad")
    edit_json(path / "config.json", num_hidden_layers=3)
    assert "torch" not in imported_by("inspect", path, code=1)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"model_type": "bart"}, "model_type: 'bart' is not supported. Known: bert"),
        ("config.json", {"hidden_size": "wide"}, "hidden_size: an integer is expected"),
        ("modules.json", None, "modules.json: malformed JSON"),
        ("model.safetensors", None, "has no weights"),
        ("tokenizer.json", None, "tokenizer.json"),
    ],
)
def test_inspect_says_why_a_folder_cannot_be_served(bert, tmp_path, capsys, file, changes, message):
    path = copy(bert, tmp_path / "bad")
    if changes is not None:
        edit_json(path / file, **changes)
    elif file == "modules.json":
        Path(path / file).write_text("[")
    else:
        (path / file).unlink()
    assert rose("inspect", path, "--json") == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error


def test_convert_says_what_its_target_lacks(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "file").touch()
    for source, options, words in (
        ("model", (), "model is a model folder: add --quantization int8"),
        ("file", ("--quantization", "int8"), "file is no model folder: --quantization rounds"),
        ("none", ("--quantization", "int8"), "none does not exist"),
    ):
        assert rose("convert", tmp_path / source, tmp_path / "out", *options) == 1
        assert words in capsys.readouterr().err


def test_a_signal_before_there_is_a_loop_ends_with_a_word_and_exit_code_0():
    code = (
        "import time\n"
        "from rose.serving.process import leave_on_stop_signals, set_up_logging\n"
        "leave_on_stop_signals()\n"
        "set_up_logging('info', 'engine x')\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    try: time.sleep(60)\n"
        "    except BaseException: pass\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"engine x: stopped before it was ready" in errors


def test_chat_shows_its_commands_and_asks_no_model_for_them(monkeypatch, capsys):
    lines = iter(["/help", "/what", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    chat._converse(None, [], None)
    shown = capsys.readouterr().out
    assert shown.count(chat.HELP) == 2
    assert "/what is no command" in shown
