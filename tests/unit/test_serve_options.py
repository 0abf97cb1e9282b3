"""Options of `rose serve`, `rose engine` and `rose gateway`: names, defaults, keys, logs."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from rose.runtime.build import ModelOptions
from rose.serving import cli
from rose.serving.commands.flags import EngineFlags, GatewayFlags, LogFlags, as_options
from rose.serving.commands.keys import read_keys
from rose.serving.commands.options import parse_size
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.process import set_up_logging

COMMANDS = typer.main.get_command(cli.app).commands
ENGINE = (
    "--device --dtype --quantization --attention --max-model-len --max-batch-tokens --max-num-seqs "
    "--kv-cache-memory --max-graph-tokens --warmup --task --deterministic"
)
GATEWAY = (
    "--truncate --strict-dimensions --rank-by-cosine --request-timeout --max-body-size --max-inputs "
    "--max-concurrent-requests --tokenizer-threads --public-metrics --public-docs "
    "--cors-origin --log-requests"
)
TLS_FLAGS = "--tls-cert --tls-key"
LOGS = "--log-level --log-format --otlp-endpoint"
KEYS = "--api-key --api-key-file"


TLS = Path(__file__).parents[1] / "tls"


def rose(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "serve",
            f"{ENGINE} {GATEWAY} {TLS_FLAGS} {LOGS} --host --port {KEYS} --replicas --gateway-workers",
        ),
        ("engine", f"{ENGINE} {LOGS} --bind --keys --name"),
        (
            "gateway",
            f"--engine {GATEWAY} {TLS_FLAGS} {LOGS} --host --port --listen-fd --worker --keys {KEYS}",
        ),
    ],
)
def test_flags_do_not_change_unnoticed(name, flags):
    options = [p for p in COMMANDS[name].params if p.param_type_name == "option"]
    assert [flag for p in options for flag in (*p.opts, *p.secondary_opts)] == flags.split()


def test_defaults_are_those_of_what_is_set():
    assert EngineFlags().model_options("m", None) == ModelOptions(path="m")
    assert GatewayFlags().settings(()) == GatewaySettings()


def test_every_flag_reaches_what_it_sets():
    changed = {
        "device": "cpu",
        "dtype": "float32",
        "quantization": "int8",
        "attention": "torch_sdpa",
        "max_model_len": 5,
        "max_batch_tokens": 6,
        "max_num_seqs": 7,
        "kv_cache_memory": 8,
        "max_graph_tokens": 9,
        "warmup": "2x3",
        "task": "embed",
        "deterministic": True,
    }
    assert changed.keys() == {field.name for field in fields(EngineFlags)}
    options = EngineFlags(**changed).model_options("m", "name")
    default = ModelOptions(path="m")
    unchanged = {
        f.name for f in fields(options) if getattr(options, f.name) == getattr(default, f.name)
    }
    assert unchanged == {"path"}
    changed = {
        "truncate": True,
        "strict_dimensions": True,
        "rank_by_cosine": True,
        "request_timeout": 5.0,
        "max_body_size": 6,
        "max_inputs": 7,
        "max_concurrent_requests": 8,
        "tokenizer_threads": 19,
        "public_metrics": True,
        "public_docs": True,
        "cors_origin": ["https://a.example"],
        "log_requests": True,
    }
    assert changed.keys() == {field.name for field in fields(GatewayFlags)}
    settings = GatewayFlags(**changed).settings(("k",))
    default = GatewaySettings()
    unchanged = {
        f.name for f in fields(settings) if getattr(settings, f.name) == getattr(default, f.name)
    }
    assert unchanged == {"max_body_bytes_in_flight", "body_timeout_s", "max_tokenize_chars"}


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--device", "cpu", "--kv-cache-memory", "1.5GiB", "--deterministic", "--task", "embed"],
        [
            "--max-body-size",
            "7MB",
            "--truncate",
            "--request-timeout",
            "2.5",
            "--log-format",
            "json",
        ],
        ["--cors-origin", "https://a.example", "--cors-origin", "https://b.example:8"],
        ["--tls-cert", str(TLS / "cert.pem"), "--tls-key", str(TLS / "key.pem")],
    ],
)
def test_a_child_reads_the_options_as_they_were_written_for_it(options, monkeypatch):
    """What `rose serve` got is what its children get."""
    got = {}

    class Supervisor:
        def __init__(self, models, **settings):
            got.update(settings)

        def run(self):
            return 0

    monkeypatch.setattr("rose.serving.supervisor.Supervisor", Supervisor)
    monkeypatch.setattr("rose.serving.process.set_up_logging", lambda *_: None)
    assert rose("serve", "model", *options) == 0
    parsed = {}
    for name in ("engine", "gateway"):
        command = COMMANDS[name]
        words = [*got[f"{name}_options"], *(["--engine", "x"] if name == "gateway" else ["m"])]
        if name == "engine":
            words += ["--bind", "y"]
        parsed |= command.make_context(name, words).params
    given = COMMANDS["serve"].make_context("serve", ["model", *options]).params
    own = {"models", "host", "port", "api_key", "api_key_file", "replicas", "gateway_workers"}
    assert {n: v for n, v in given.items() if n not in own} == {
        n: parsed[n] for n in given if n not in own
    }


def test_options_of_a_child_leave_out_what_is_not_set():
    assert as_options(LogFlags()) == ["--log-level", "info", "--log-format", "text"]
    words = as_options(EngineFlags(deterministic=True, max_model_len=5))
    assert words[-1] == "--deterministic"
    assert "--task" not in words
    assert words[words.index("--max-model-len") + 1] == "5"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-cache-memory", "lots"], "'lots' is no size"),
        (["--max-body-size", "-1"], "'-1' is no size"),
        (["--dtype", "int3"], "bfloat16"),
        (["--log-level", "loud"], "warning"),
        (["--log-format", "xml"], "json"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--max-inputs", "0"], "--max-inputs"),
    ],
)
def test_a_wrong_value_says_what_is_possible(options, words, capsys):
    assert rose("serve", "model", *options) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tls-cert", TLS / "cert.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-cert", TLS / "none.pem", "--tls-key", TLS / "key.pem"], "No such file"),
        (["--tls-cert", TLS / "key.pem", "--tls-key", TLS / "key.pem"], "--tls-cert"),
    ],
)
def test_tls_files_that_cannot_be_used_are_said_before_anything_starts(options, words, capsys):
    assert rose("serve", "model", *options) == 1
    assert words in capsys.readouterr().err


# Keys


def test_keys_come_from_options_and_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\n b \n\nc\n")
    assert read_keys(None, None) == ()
    assert read_keys(["a"], file) == ("a", "b", "c")
    assert read_keys(["b", "a", "b"], None) == ("b", "a")


@pytest.mark.parametrize("key", ["", " ", "a b", "a\tb", " a", "a\x00"])
def test_a_key_that_would_leave_the_door_open_is_refused(key):
    with pytest.raises(ValueError, match="--api-key: a key"):
        read_keys(["good", key], None)


def test_an_empty_variable_or_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("\n# none\n")
    with pytest.raises(ValueError, match="has no key"):
        read_keys(None, tmp_path / "keys")
    with pytest.raises(OSError, match="No such file"):
        read_keys(None, tmp_path / "nothing")
    monkeypatch.setenv("ROSE_API_KEY", "")
    with pytest.raises(ValueError, match="ROSE_API_KEY is set and empty"):
        read_keys(None, None)
    assert read_keys(["a"], None) == ("a",)


@pytest.mark.parametrize(
    ("variable", "options", "keys"),
    [
        ("a b", [], "a b"),
        ("a", ["--api-key", "b", "--api-key", "c"], "b c"),
        (None, [], ""),
    ],
)
def test_several_keys_reach_the_gateway(variable, options, keys, monkeypatch):
    got = {}

    class Supervisor:
        def __init__(self, models, **settings):
            got.update(settings)

        def run(self):
            return 0

    monkeypatch.setattr("rose.serving.supervisor.Supervisor", Supervisor)
    monkeypatch.setattr("rose.serving.process.set_up_logging", lambda *_: None)
    if variable is None:
        monkeypatch.delenv("ROSE_API_KEY", raising=False)
    else:
        monkeypatch.setenv("ROSE_API_KEY", variable)
    assert rose("serve", "model", *options) == 0
    assert got["secrets"] == {"ROSE_API_KEY": keys}
    assert not any("--api-key" in word for word in got["gateway_options"])


# Logs


@pytest.fixture
def start_logging():
    """Sets up logging in this process, where pytest has done so already, and undoes it."""
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level

    def start(*options):
        root.handlers.clear()
        set_up_logging(*options)
        return logging.getLogger("rose.test")

    yield start
    root.handlers[:] = kept
    root.setLevel(level)


def test_a_line_of_json_a_message(start_logging, capsys):
    log = start_logging("info", "engine m", "json")
    log.info("a %s\nof two lines", "message")
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("it failed", extra={"request_id": "req-1"})
    log.debug("not said")
    first, second = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert first.pop("time")[:2] == "20"
    assert first == {
        "level": "info",
        "process": "engine m",
        "logger": "rose.test",
        "message": "a message\nof two lines",
    }
    assert second["request_id"] == "req-1"
    assert second["exception"].endswith("KeyError: 'x'")


def test_a_line_of_text_a_message(start_logging, capsys):
    log = start_logging("WARNING", "gateway")
    log.info("not said")
    log.warning("said")
    assert capsys.readouterr().err.split(" ", 1)[1] == "WARNING gateway: said\n"


def test_help_of_the_server_imports_nothing_that_takes_time():
    code = (
        "import sys\nfrom rose.serving.cli import main\n"
        "try:\n    main(['serve', '--help'])\n"
        "finally:\n    print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize("text", ["9" * 400, "20000000TB", "-1", "1.5.2GB", ""])
def test_a_size_that_no_machine_has_is_refused(text):
    with pytest.raises(ValueError, match=r"size|more than any machine has"):
        parse_size(text)
