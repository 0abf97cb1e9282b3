"""`rose generate`, from the command line to the file, also when it is stopped on the way."""

import csv
import dataclasses
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import typer
from pyarrow import parquet
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rose import Engine, SamplingParams
from rose.runtime.generation import GenerationLoop
from rose.runtime.sampler import Sampler
from rose.serving import cli
from rose.serving.cli import main
from rose.serving.offline.generate import GenerateFile
from tests.tiny import copy, edit_json, edit_tensors, save_bert, save_decoder
from tests.unit.gguf_files import bpe

SMOLLM = Path(__file__).resolve().parents[2] / ".models" / "SmolLM2-135M-Instruct"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ m.role }} {{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}A {% endif %}"
)
MAX_TOKENS = 6
SHORT = ["--max-tokens", MAX_TOKENS]
GREEDY = [*SHORT, "--temperature", 0]
TEXTS = ["Hello", "the sea", "a", "7 kites over the red hill", "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_decoder(tmp_path_factory.mktemp("models") / "tiny", "llama", seed=7)
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, max_num_seqs=4, max_model_len=64) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_lines(path, texts):
    Path(path).write_text("".join(f"{text}\n" for text in texts))


def write_rows(path, rows):
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def texts_of(path):
    return [row["text"] for row in read_rows(path)]


def rose(*arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def generate(model, *arguments):
    return rose("generate", model, "--max-model-len", 64, "--max-num-seqs", 4, *arguments)


def completions(engine, prompts, **values):
    params = SamplingParams(**{"temperature": 0, "max_tokens": MAX_TOKENS, **values})
    return [done.text for done in engine.generate(prompts, params)]


# What goes in and out


def test_every_input_format_gives_the_same_completions(model, engine, monkeypatch):
    write_lines("a.txt", TEXTS)
    write_rows("a.jsonl", TEXTS)
    write_rows("b.jsonl", [{"n": 1, "body": t} for t in TEXTS])
    with Path("c.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("n", "body"), *((i, t) for i, t in enumerate(TEXTS))])
    parquet.write_table(pa.table({"n": range(len(TEXTS)), "body": TEXTS}), "d.parquet")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("a.txt").read_bytes())))
    expected = completions(engine, TEXTS)
    for path in ("a.txt", "a.jsonl", "b.jsonl", "c.csv", "d.parquet", "-"):
        column = [] if path[0] in "a-" else ["--column", "body"]
        assert generate(model, path, *GREEDY, *column, "-o", f"{path}.out.jsonl") == 0
        assert texts_of(f"{path}.out.jsonl") == expected


def test_a_row_tells_what_came_of_it(model, engine, capsys):
    write_lines("a.txt", TEXTS)
    assert generate(model, "a.txt", *GREEDY, "--max-tokens", 24, "-o", "o.jsonl") == 0
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = engine.generate(TEXTS, params)
    for index, (row, done) in enumerate(zip(read_rows("o.jsonl"), expected, strict=True)):
        assert row == {
            "index": index,
            "text": done.text,
            "finish_reason": done.finish_reason,
            "prompt_tokens": len(TEXTS[index]),
            "completion_tokens": len(done.token_ids),
        }
    assert {done.finish_reason for done in expected} == {"stop", "length"}
    tokens = sum(len(done.token_ids) for done in expected)
    assert capsys.readouterr().out == f"o.jsonl: 5 rows, 39 tokens in, {tokens} tokens out\n"


def test_columns_are_kept_and_the_text_may_have_another_name(model, engine):
    rows = [{"id": i, "tags": ["x"] * (i % 3), "text": t} for i, t in enumerate(TEXTS)]
    write_rows("a.jsonl", rows)
    keep = ["--keep", "id", "--keep", "tags", "--keep", "text", "--output-column", "answer"]
    for name in ("o.jsonl", "o.parquet"):
        assert generate(model, "a.jsonl", *GREEDY, *keep, "-o", name) == 0
    texts = completions(engine, TEXTS)
    found = zip(read_rows("o.jsonl"), parquet.read_table("o.parquet").to_pylist(), strict=True)
    for index, (line, row) in enumerate(found):
        assert line.pop("index") == index
        assert list(line)[:4] == ["id", "tags", "text", "answer"]
        assert row.pop("error") is None
        assert row == line
        assert (row["text"], row["answer"]) == (TEXTS[index], texts[index])


def test_a_parquet_file_keeps_its_types(model):
    ids = pa.array([1, None, 3], pa.int16())
    kinds = pa.array(["x", "y", "x"]).dictionary_encode()
    parquet.write_table(pa.table({"id": ids, "kind": kinds, "text": TEXTS[:3]}), "a.parquet")
    keep = ["--keep", "id", "--keep", "kind", "--output-column", "answer"]
    assert generate(model, "a.parquet", *GREEDY, *keep, "-o", "o.parquet") == 0
    table = parquet.read_table("o.parquet")
    assert table.schema.field("id").type == pa.int16()
    assert table.column("id").to_pylist() == [1, None, 3]
    assert table.column("kind").to_pylist() == ["x", "y", "x"]
    assert table.schema.field("completion_tokens").type == pa.int32()


# What the options mean


def test_a_text_goes_through_the_chat_template_when_asked_to(model, engine):
    write_lines("a.txt", TEXTS)
    assert generate(model, "a.txt", *GREEDY, "--chat", "-o", "o.jsonl") == 0
    system = ["--chat", "--system", "be good"]
    assert generate(model, "a.txt", *GREEDY, *system, "-o", "p.jsonl") == 0
    assert texts_of("o.jsonl") == completions(engine, [f"user {t}.A " for t in TEXTS])
    assert texts_of("p.jsonl") == completions(
        engine, [f"system be good.user {t}.A " for t in TEXTS]
    )


@pytest.mark.parametrize("column", [[], ["--column", "messages"]])
def test_a_column_may_hold_conversations(model, engine, column):
    def talk(*pairs):
        return {"id": "a", "messages": [{"role": r, "content": c} for r, c in pairs]}

    write_rows(
        "a.jsonl",
        [talk(("user", "Hello")), talk(("user", "a"), ("assistant", "b"), ("user", "c"))],
    )
    for options, start in ([], ""), (["--system", "be good"], "system be good."):
        name = f"{len(options)}.jsonl"
        assert generate(model, "a.jsonl", *GREEDY, *column, *options, "-o", name) == 0
        prompts = [f"{start}user Hello.A ", f"{start}user a.assistant b.user c.A "]
        assert texts_of(name) == completions(engine, prompts)


def test_stop_strings_end_a_text(model, engine):
    write_lines("a.txt", TEXTS)
    whole = completions(engine, TEXTS)
    stops = [whole[0][3], whole[1][2:4]]
    stop = [word for text in stops for word in ("--stop", text)]
    assert generate(model, "a.txt", *GREEDY, *stop, "-o", "o.jsonl") == 0
    expected = engine.generate(TEXTS, SamplingParams(temperature=0, max_tokens=6), stop=stops)
    assert texts_of("o.jsonl") == [done.text for done in expected]
    assert len(read_rows("o.jsonl")[0]["text"]) <= 3


def test_a_seed_counts_on_with_the_rows(model, engine):
    write_lines("a.txt", ["a"] * 6)
    options = [*SHORT, "--temperature", 3, "--seed", 40]
    for name in ("o.jsonl", "p.jsonl"):
        assert generate(model, "a.txt", *options, "-o", name) == 0
    assert Path("o.jsonl").read_bytes() == Path("p.jsonl").read_bytes()
    expected = [completions(engine, "a", temperature=3, seed=40 + i)[0] for i in range(6)]
    assert texts_of("o.jsonl") == expected
    assert len(set(expected)) == 6


def test_sampling_options_mean_what_they_mean_in_python(model, engine):
    write_lines("a.txt", TEXTS)
    values = {"temperature": 2.0, "top_p": 0.7, "top_k": 9, "min_p": 0.02}
    values |= {"repetition_penalty": 1.3, "seed": 5}
    options = [
        word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    assert generate(model, "a.txt", *SHORT, *options, "-o", "o.jsonl") == 0
    values.pop("seed")
    expected = [completions(engine, t, **values, seed=5 + i)[0] for i, t in enumerate(TEXTS)]
    assert texts_of("o.jsonl") == expected


def test_the_checkpoint_s_sampling_is_the_default(model, tmp_path, engine):
    path = copy(model, tmp_path / "greedy")
    edit_json(path / "generation_config.json", do_sample=True, temperature=3.0, top_k=1)
    write_lines("a.txt", TEXTS)
    assert generate(path, "a.txt", *SHORT, "-o", "o.jsonl") == 0
    assert texts_of("o.jsonl") == completions(engine, TEXTS)


def test_every_completion_follows_a_schema(tmp_path):
    pytest.importorskip("llguidance")
    path = save_decoder(tmp_path / "llm", "llama", vocab_size=320, eos_token_id=2)
    backend = bpe(pre_tokenizers.ByteLevel(False))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    Path("schema.json").write_text(json.dumps(schema))
    write_lines("a.txt", ["a", "the sea", "over"])
    options = ["--json-schema", "schema.json", "--temperature", 2, "--max-tokens", 50]
    assert generate(path, "a.txt", *options, "-o", "o.jsonl") == 0
    for row in read_rows("o.jsonl"):
        assert 1 <= json.loads(row["text"])["n"] <= 99
        assert row["finish_reason"] == "stop"


def test_deterministic_runs_one_row_at_a_time(model, monkeypatch):
    sizes = []
    original = GenerationLoop.advance

    def advance(self):
        sizes.append(self._scheduler.num_running)
        return original(self)

    monkeypatch.setattr(GenerationLoop, "advance", advance)
    write_lines("a.txt", ["7 kites over the red hill"] * 4)
    assert generate(model, "a.txt", *GREEDY, "--deterministic", "-o", "o.jsonl") == 0
    assert max(sizes) == 1
    assert len(set(texts_of("o.jsonl"))) == 1


def test_the_command_has_the_defaults_of_the_job():
    command = typer.main.get_command(cli.app).commands["generate"]
    params = {p.name: p for p in command.params}
    params["input"] = params.pop("input_file")
    for field in dataclasses.fields(GenerateFile):
        if field.default is not dataclasses.MISSING:
            assert (params[field.name].default or None) == (field.default or None), field.name
    assert params.keys() - {f.name for f in dataclasses.fields(GenerateFile)} == {"log_level"}


@pytest.mark.golden
def test_a_real_model_answers():
    if not SMOLLM.is_dir():
        pytest.skip(f"{SMOLLM} is not there; `make models` fetches it")
    write_lines("a.txt", ["What is the capital of France? Answer in one sentence."])
    options = ["--chat", "--temperature", 0, "--max-model-len", 256]
    assert rose("generate", SMOLLM, "a.txt", *options, "-o", "o.jsonl") == 0
    (row,) = read_rows("o.jsonl")
    assert row["text"] == "The capital of France is Paris."
    assert row["finish_reason"] == "stop"


# What is wrong


def test_a_row_that_cannot_be_served_has_an_error_and_the_others_go_on(model, engine, capsys):
    write_lines("a.txt", ["Hello", "", "x" * 64, "the sea"])
    assert generate(model, "a.txt", *GREEDY, "-o", "o.jsonl") == 1
    assert generate(model, "a.txt", *GREEDY, "-o", "o.parquet") == 1
    rows, expected = read_rows("o.jsonl"), completions(engine, ["Hello", "the sea"])
    assert [rows[0]["text"], rows[3]["text"]] == expected
    assert rows[1] == {"index": 1, "error": "the prompt has no tokens"}
    assert "the prompt has 64 tokens" in rows[2]["error"]
    table = parquet.read_table("o.parquet")
    assert table.column("text").to_pylist() == [expected[0], None, None, expected[1]]
    assert table.column("error").to_pylist() == [None, rows[1]["error"], rows[2]["error"], None]
    out, error = capsys.readouterr()
    assert out.splitlines()[0].endswith("; 2 rows have an error instead of a text")
    assert error == ""
    assert not Path("o.jsonl.partial").exists()


def test_conversations_that_cannot_be_rendered_are_errors_of_their_rows(model, engine):
    messages = [
        [{"role": "user", "content": "Hello"}],
        [{"role": "tool", "content": "x"}],
        ["Hello"],
        [{"content": "Hello"}],
        [{"role": "user", "content": 7}],
    ]
    write_rows("a.jsonl", [{"messages": m} for m in messages])
    assert generate(model, "a.jsonl", *GREEDY, "-o", "o.jsonl") == 1
    rows = read_rows("o.jsonl")
    assert rows[0]["text"] == completions(engine, "user Hello.A ")[0]
    assert rows[1]["error"] == "the chat template fails: no tools here"
    assert rows[2]["error"] == rows[3]["error"] == "messages[0]: an object with a role is expected"
    assert rows[4]["error"].startswith("messages[0].content: ")


def test_a_row_whose_logits_are_no_numbers_has_an_error(tmp_path):
    def spoil(tensors):
        tensors["model.embed_tokens.weight"][4] = torch.nan  # the letter a
        return tensors

    path = save_decoder(tmp_path / "bad", "llama")
    edit_tensors(path, spoil)
    write_lines("a.txt", ["bcd", "abc", "the"])
    assert generate(path, "a.txt", "--max-tokens", 1, "-o", "o.jsonl") == 1
    rows = read_rows("o.jsonl")
    assert [("error" in row) for row in rows] == [False, True, False]
    assert "not finite" in rows[1]["error"]


def test_strict_stops_at_the_first_bad_row_and_keeps_what_is_done(model, capsys):
    write_rows("a.jsonl", [{"q": t} for t in [*TEXTS * 3, "x" * 64, "a"]])
    options = [*GREEDY, "--column", "q", "-o", "o.jsonl"]
    assert generate(model, "a.jsonl", *options, "--strict") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: a.jsonl, line 16, column 'q': the prompt has 64 tokens")
    done = len(saved("o.jsonl"))
    assert 0 < done < 16
    assert generate(model, "a.jsonl", *options) == 1
    assert len(read_rows("o.jsonl")) == 17


def test_what_had_errors_cannot_go_on_strictly(model, capsys, monkeypatch):
    write_lines("a.txt", ["", *TEXTS])
    Path("a.txt").write_bytes(Path("a.txt").read_bytes() + b"\xff\n")
    assert generate(model, "a.txt", *GREEDY, "-o", "o.jsonl") == 1
    assert "a.txt, line 7: not UTF-8" in capsys.readouterr().err
    assert generate(model, "a.txt", *GREEDY, "--strict", "-o", "o.jsonl") == 1
    assert "begun without --strict and has 1 row with an error" in capsys.readouterr().err


def test_a_fault_that_is_not_the_row_s_ends_the_job(model, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Sampler, "sample", fail)
    write_lines("a.txt", TEXTS)
    with pytest.raises(RuntimeError, match="out of memory"):
        main(["generate", str(model), "a.txt", "-o", "o.jsonl"])
    assert not Path("o.jsonl").exists()


def test_mistakes_end_with_one_line_and_exit_code_1(model, tmp_path, capsys):
    def error(*arguments):
        assert generate(model, *arguments) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    write_lines("a.txt", TEXTS)
    write_rows("a.jsonl", [{"id": 1, "text": "a"}, {"id": 2, "text": 3}])
    write_rows("b.jsonl", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": "b"}])
    Path("empty.txt").write_text("")
    Path("taken.jsonl").write_text("mine")
    Path("bad.json").write_text("{")
    before = sorted(Path().iterdir())

    assert error("no.txt", "-o", "o.jsonl") == "no.txt does not exist"
    assert error("empty.txt", "-o", "o.jsonl") == "empty.txt holds no prompts"
    assert error("a.txt", "-o", "taken.jsonl") == "taken.jsonl exists already; --force replaces it"
    assert error("a.txt", "-o", "no/o.jsonl") == "no/o.jsonl: the folder no does not exist"
    assert error("a.txt", "-o", "o.npy").startswith(
        "o.npy: the output's name must end in one of .jsonl, .parquet"
    )
    assert error("a.txt", "-o", "o.jsonl", "--keep", "id").startswith(
        "--keep: a.txt has no columns"
    )
    assert error("a.jsonl", "-o", "o.jsonl", "--keep", "text").startswith(
        "--keep: the completions are to be in a column 'text' too; "
    )
    assert error("a.jsonl", "-o", "o.jsonl", "--output-column", "error").startswith(
        "--output-column: the output has a column 'error' already"
    )
    assert error("a.txt", "-o", "o.jsonl", "--system", "x") == (
        "--system: a text that is continued has no system message; add --chat"
    )
    assert error("a.txt", "-o", "o.jsonl", "--json-schema", "no.json") == (
        "--json-schema: cannot read no.json: No such file or directory"
    )
    assert "the JSON schema is not valid JSON" in error(
        "a.txt", "-o", "o.jsonl", "--json-schema", "bad.json"
    )
    assert error("a.txt", "-o", "o.jsonl", "--top-p", 0) == "top_p is 0.0; above 0 is possible"
    assert sorted(Path().iterdir()) == before
    assert error("a.jsonl", "-o", "o.jsonl") == (
        "a.jsonl, line 2: column 'text': a text is expected, found a number"
    )
    assert error("b.jsonl", "-o", "p.jsonl") == (
        "b.jsonl, line 2: column 'messages': a list is expected, found a string"
    )
    bert = save_bert(tmp_path / "bert")
    capsys.readouterr()
    assert rose("generate", bert, "a.txt", "-o", "q.jsonl") == 1
    assert "cannot generate" in capsys.readouterr().err


def test_chat_needs_a_template(tmp_path):
    path = save_decoder(tmp_path / "llm", "llama")
    write_lines("a.txt", TEXTS)
    assert generate(path, "a.txt", "--chat", "-o", "o.jsonl") == 1
    assert {row["error"] for row in read_rows("o.jsonl")} == {"the model has no chat template"}


def test_force_replaces_an_output(model):
    write_lines("a.txt", TEXTS)
    Path("o.jsonl").write_text("old")
    assert generate(model, "a.txt", *GREEDY, "-o", "o.jsonl", "--force") == 0
    assert len(read_rows("o.jsonl")) == 5


# Going on after a stop


def saved(output):
    """Records of the rows that are saved."""
    folder = Path(f"{output}.partial")
    lines = [line for path in sorted(folder.glob("*.chunk")) for line in read_rows(path)]
    journal = folder / "chunks.jsonl"
    rows = sum(chunk["rows"] for chunk in read_rows(journal)) if journal.exists() else 0
    return lines[:rows]


@pytest.fixture
def stopped(model, capsys):
    """Work that stopped at line 31, of which most rows before are done; returns good texts."""
    texts = [f"{text} {i}" for i, text in enumerate(TEXTS * 8)]
    write_lines("a.txt", texts[:30])
    with Path("a.txt").open("ab") as file:
        file.write(b"\xff\n")
    assert generate(model, "a.txt", *GREEDY, "-o", "o.jsonl") == 1
    assert "a.txt, line 31: not UTF-8" in capsys.readouterr().err
    assert 16 < len(saved("o.jsonl")) < 31
    return texts


def test_a_mistake_far_in_the_file_can_be_mended_there(model, engine, stopped, monkeypatch):
    done = {record["index"] for record in saved("o.jsonl")}
    ran = []
    original = GenerationLoop.add

    def add(self, request_id, prompt_ids, *rest, **options):
        ran.append(len(prompt_ids))
        return original(self, request_id, prompt_ids, *rest, **options)

    monkeypatch.setattr(GenerationLoop, "add", add)
    write_lines("a.txt", stopped)
    assert generate(model, "a.txt", *GREEDY, "-o", "o.jsonl") == 0
    assert ran == [len(text) for index, text in enumerate(stopped) if index not in done]
    assert texts_of("o.jsonl") == completions(engine, stopped)
    assert [row["index"] for row in read_rows("o.jsonl")] == list(range(40))
    assert not Path("o.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", 1], "--seed was not given and is 1"),
        (["--max-tokens", 7], "--max-tokens was 6 and is 7"),
        (["--stop", "x"], "--stop was not given and is ['x']"),
        (["--chat"], "--chat was not given and is True"),
        (["--json-schema", "s.json"], "the file of --json-schema has other content"),
    ],
)
def test_other_options_are_refused(model, stopped, capsys, arguments, message):
    Path("s.json").write_text('{"type": "integer"}')
    assert generate(model, "a.txt", *GREEDY, "-o", "o.jsonl", *arguments) == 1
    error = capsys.readouterr().err
    assert f"o.jsonl.partial was begun with something else: {message}. " in error


def test_another_model_is_refused(stopped, tmp_path, capsys):
    other = save_decoder(tmp_path / "other", "llama", seed=8)
    assert generate(other, "a.txt", *GREEDY, "-o", "o.jsonl") == 1
    assert "was begun with something else: MODEL has other content." in capsys.readouterr().err


def test_another_input_is_refused(model, stopped, capsys):
    write_lines("a.txt", [*stopped[:4], "other", *stopped[5:]])
    assert generate(model, "a.txt", *GREEDY, "-o", "o.jsonl") == 1
    assert "a.txt differs at line 5 from what o.jsonl.partial was begun" in capsys.readouterr().err
    write_lines("a.txt", stopped[:4])
    assert generate(model, "a.txt", *GREEDY, "-o", "o.jsonl") == 1
    assert "a.txt differs at its end from" in capsys.readouterr().err


def test_the_columns_to_keep_may_change_on_the_way(model, engine):
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS * 6)]
    write_rows("a.jsonl", [*rows, {"id": 30}])
    assert generate(model, "a.jsonl", *GREEDY, "-o", "o.jsonl") == 1
    assert saved("o.jsonl")
    write_rows("a.jsonl", rows)
    assert generate(model, "a.jsonl", *GREEDY, "--keep", "id", "-o", "o.jsonl") == 0
    assert [row["id"] for row in read_rows("o.jsonl")] == list(range(30))
    assert texts_of("o.jsonl") == completions(engine, TEXTS * 6)


def test_an_input_that_changes_meanwhile_is_noticed(model, capsys, monkeypatch):
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    write_rows("a.jsonl", rows)
    original = Engine.close

    def close(self):
        write_rows("a.jsonl", [*rows[:2], {"id": 2, "text": "other"}, *rows[3:]])
        original(self)

    monkeypatch.setattr(Engine, "close", close)
    assert generate(model, "a.jsonl", *GREEDY, "--keep", "id", "-o", "o.jsonl") == 1
    assert "a.jsonl differs at line 3" in capsys.readouterr().err
    assert not Path("o.jsonl").exists()
    assert len(saved("o.jsonl")) == 5


def test_restart_begins_afresh(model, engine, stopped):
    write_lines("a.txt", stopped)
    options = ["--temperature", 0, "--max-tokens", 3, "--restart", "-o", "o.jsonl"]
    assert generate(model, "a.txt", *options) == 0
    assert texts_of("o.jsonl") == completions(engine, stopped, max_tokens=3)


def start(model, *arguments):
    command = [sys.executable, "-m", "rose", "generate", model, "--max-model-len", 64]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(word) for word in (*command, "--max-num-seqs", 8, *arguments)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(process, count):
    """Wait until so many rows are saved, or the process is done."""
    while process.poll() is None and len(saved("o.jsonl")) < count:
        time.sleep(0.01)


def test_killed_and_interrupted_it_goes_on_to_the_same_bytes(model):
    rng = random.Random(0)
    rows = [{"id": i, "text": "".join(rng.choices("abcdef", k=9))} for i in range(1000)]
    write_rows("in.jsonl", rows)
    job = ["in.jsonl", "--keep", "id", "--temperature", 2, "--seed", 3, "--max-tokens", 3]

    process = start(model, *job, "-o", "o.jsonl")
    wait_for_rows(process, 1)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    killed_at = len(saved("o.jsonl"))

    process = start(model, *job, "-o", "o.jsonl")
    wait_for_rows(process, killed_at + 1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    stopped_at = len(saved("o.jsonl"))
    assert error.splitlines()[-1] == (
        f"stopped: {stopped_at:,} texts are done and kept in o.jsonl.partial; "
        "the same command goes on from there"
    )

    assert 0 < killed_at < stopped_at < 1000
    assert generate(model, *job, "-o", "o.jsonl") == 0
    assert generate(model, *job, "-o", "whole.jsonl") == 0
    assert Path("o.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert not Path("o.jsonl.partial").exists()
