"""`rose embed`, from the command line to the file, also when it is stopped on the way."""

import csv
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from rose import Engine
from rose.serving.cli import main
from tests.tiny import WORDS, copy, edit_json, edit_tensors, save_bert, save_decoder

MINILM = Path(__file__).resolve().parents[2] / ".models" / "all-MiniLM-L6-v2"
DIMENSIONS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny BERT with two prompts, limited to 40 tokens."""
    path = save_bert(tmp_path_factory.mktemp("models") / "tiny")
    edit_json(
        path / "config_sentence_transformers.json",
        prompts={"query": "the tea ", "passage": "red sea "},
    )
    return path


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, max_batch_tokens=256) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def sentences(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(count)]


def write_lines(path, texts):
    Path(path).write_text("".join(f"{text}\n" for text in texts))


def rose(*arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def embed(model, *arguments):
    return rose("embed", model, "--max-batch-tokens", 256, *arguments)


def close(found, expected):
    return np.allclose(found, expected, rtol=1e-4, atol=1e-5)


# What goes in and out


def test_every_input_format_gives_the_same_vectors(model, engine, capsys):
    texts = [*sentences(20), "", 'tea, "red" tea\nover']
    Path("a.jsonl").write_text("\n".join(json.dumps(t) for t in texts))
    Path("b.jsonl").write_text("\n".join(json.dumps({"n": 1, "body": t}) for t in texts))
    with Path("c.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("n", "body"), *((i, t) for i, t in enumerate(texts))])
    parquet.write_table(pa.table({"n": range(len(texts)), "body": texts}), "d.parquet")
    expected = engine.embed(texts)
    for path in ("a.jsonl", "b.jsonl", "c.csv", "d.parquet"):
        column = [] if path == "a.jsonl" else ["--column", "body"]
        assert embed(model, path, *column, "-o", f"{path}.npy") == 0
        assert close(np.load(f"{path}.npy"), expected)
    assert "22 texts, " in capsys.readouterr().out


def test_lines_of_a_file_and_of_standard_input(model, engine, monkeypatch):
    texts = ["red tea", "", "kite over sea"]
    write_lines("a.txt", texts)
    assert embed(model, "a.txt", "-o", "a.npy") == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("a.txt").read_bytes())))
    assert embed(model, "-", "-o", "b.npy") == 0
    assert close(np.load("a.npy"), engine.embed(texts))
    assert Path("a.npy").read_bytes() == Path("b.npy").read_bytes()


def test_columns_are_kept_next_to_the_vectors(model, engine):
    texts = sentences(7)
    rows = [{"id": i, "tags": ["x"] * (i % 3), "text": t} for i, t in enumerate(texts)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keep = ["--keep", "id", "--keep", "tags", "--chunk-size", 3]
    assert embed(model, "a.jsonl", *keep, "-o", "out.jsonl") == 0
    assert embed(model, "a.jsonl", *keep, "-o", "out.parquet") == 0
    objects = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    table = parquet.read_table("out.parquet").to_pylist()
    for index, (found, row) in enumerate(zip(objects, table, strict=True)):
        assert found["index"] == index
        assert (
            [found["id"], found["tags"]] == [row["id"], row["tags"]] == [index, ["x"] * (index % 3)]
        )
        assert found["embedding"] == [float(f"{x:.9g}") for x in row["embedding"]] or close(
            found["embedding"], row["embedding"]
        )
    assert close([row["embedding"] for row in table], engine.embed(texts))


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--prompt-name", "query"], {"prompt_name": "query"}),
        (["--prompt", "green "], {"prompt": "green "}),
        (["--dimensions", 8, "--normalize"], {"dimensions": 8, "normalize": True}),
        (["--normalize"], {"normalize": True}),
        (["--no-normalize"], {"normalize": False}),
        (["--output-dtype", "float16"], {"output_dtype": "float16"}),
        (["--output-dtype", "int8"], {"output_dtype": "int8"}),
        (["--output-dtype", "ubinary"], {"output_dtype": "ubinary"}),
    ],
)
def test_options_mean_what_they_mean_in_python(model, engine, arguments, options):
    texts = sentences(9)
    write_lines("a.txt", texts)
    assert embed(model, "a.txt", *arguments, "-o", "a.npy") == 0
    expected = engine.embed(texts, **options)
    found = np.load("a.npy")
    assert found.dtype == expected.dtype
    tolerance = 1e-2 if found.dtype == np.float16 else 1e-4 if found.dtype == np.float32 else 1
    assert np.allclose(found.astype(float), expected.astype(float), rtol=1e-2, atol=tolerance)


def test_a_language_model_can_embed(tmp_path):
    path = save_decoder(tmp_path / "llm", "qwen3")
    write_lines("a.txt", ["abc", "hello you"])
    assert embed(path, "a.txt", "-o", "a.npy") == 0
    assert np.load("a.npy").shape == (2, 32)


def test_the_same_command_gives_the_same_bytes(model):
    write_lines("a.txt", sentences(50))
    for name in ("a.npy", "b.npy"):
        assert rose("embed", model, "a.txt", "-o", name, "--chunk-size", 8) == 0
    assert Path("a.npy").read_bytes() == Path("b.npy").read_bytes()


@pytest.mark.golden
def test_a_real_model_agrees_with_its_own_library():
    from sentence_transformers import SentenceTransformer

    if not MINILM.is_dir():
        pytest.skip(f"{MINILM} is not there; `make models` fetches it")
    texts = ["A red kite over the hill.", "", "Zwölf Boxkämpfer jagen Viktor", "tea " * 300]
    write_lines("a.txt", texts)
    assert rose("embed", MINILM, "a.txt", "-o", "a.npy", "--truncate") == 0
    reference = SentenceTransformer(str(MINILM), device="cpu").encode(texts)
    assert (np.load("a.npy") * reference).sum(axis=1).min() >= 0.9999


# What is wrong


def test_mistakes_end_with_one_line_and_exit_code_1(model, capsys):
    def error(*arguments):
        assert embed(model, *arguments) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    long = " ".join(["tea"] * 60)
    write_lines("a.txt", ["fine", long])
    Path("a.csv").write_text(f"text\nfine\n\n{long}\n")
    Path("empty.txt").write_text("")
    Path("taken.npy").write_text("mine")

    assert error("no.txt", "-o", "o.npy") == "no.txt does not exist"
    assert error("empty.txt", "-o", "o.npy") == "empty.txt holds no texts"
    assert error("a.txt", "-o", "o.npy") == (
        "a.txt, line 2: the text has 62 tokens, the limit is 40; --truncate cuts it"
    )
    assert error("a.csv", "-o", "o.npy") == (
        "a.csv, line 4, column 'text': the text has 62 tokens, the limit is 40; --truncate cuts it"
    )
    assert error("a.txt", "-o", "taken.npy") == "taken.npy exists already; --force replaces it"
    assert error("a.txt", "-o", "no/o.npy") == "no/o.npy: the folder no does not exist"
    assert error("a.txt", "-o", ".") == ". is a folder"
    assert error("a.txt", "-o", "o.txt").startswith("o.txt: the output's name must end in")
    assert error("a.txt", "-o", "o.npy", "--prompt-name", "x") == (
        "unknown prompt 'x'; the model has: passage, query"
    )
    assert error("a.txt", "--truncate", "-o", "o.npy", "--dimensions", 33) == (
        "dimensions: must be from 1 to 32, not 33"
    )
    assert rose("embed", "nowhere", "a.txt", "-o", "o.npy") == 1
    assert "nowhere does not exist" in capsys.readouterr().err
    assert sorted(p.name for p in Path().iterdir()) == ["a.csv", "a.txt", "empty.txt", "taken.npy"]


def test_a_text_without_tokens_is_named(tmp_path, capsys):
    path = save_decoder(tmp_path / "llm", "llama")
    capsys.readouterr()
    write_lines("a.txt", ["abc", ""])
    assert embed(path, "a.txt", "-o", "a.npy") == 1
    assert capsys.readouterr().err == "error: a.txt, line 2: the text has no tokens\n"


def test_a_vector_that_is_no_number_is_named(model, tmp_path, capsys):
    def spoil(tensors):
        name = next(name for name in tensors if name.endswith("word_embeddings.weight"))
        tensors[name][5] = torch.nan  # the first word
        return tensors

    path = save_bert(tmp_path / "bad")
    edit_tensors(path, spoil)
    capsys.readouterr()
    write_lines("a.txt", ["red tea", "sea", f"{WORDS[0]} over"])
    assert embed(path, "a.txt", "-o", "a.npy") == 1
    assert capsys.readouterr().err == (
        "error: a.txt, line 3: the model computed NaN or infinity for the text\n"
    )


def test_truncation_is_reported(model, engine, capsys):
    texts = ["red", " ".join(["tea"] * 60)]
    write_lines("a.txt", texts)
    assert embed(model, "a.txt", "--truncate", "-o", "a.npy") == 0
    assert capsys.readouterr().out == "a.npy: 2 texts, 43 tokens; 1 text was cut to 40 tokens\n"
    assert close(np.load("a.npy"), engine.embed(texts, truncate=True))


def test_force_replaces_an_output(model):
    write_lines("a.txt", ["red"])
    Path("a.npy").write_text("old")
    assert embed(model, "a.txt", "-o", "a.npy", "--force") == 0
    assert np.load("a.npy").shape == (1, DIMENSIONS)


# Going on after a stop

CHUNKED = ["--chunk-size", 4]


@pytest.fixture
def count_texts(monkeypatch):
    """Count the texts that the model runs."""
    counts = []
    original = Engine.embed_encoded

    def counted(self, encoded, **options):
        counts.append(len(encoded.ids))
        return original(self, encoded, **options)

    monkeypatch.setattr(Engine, "embed_encoded", counted)
    return counts


@pytest.fixture
def stopped(model, capsys):
    """Work that stopped at line 11 of 12, of which 8 lines are done; returns the good texts."""
    texts = sentences(12)
    write_lines("a.txt", [*texts[:10], " ".join(["tea"] * 60), texts[11]])
    assert embed(model, "a.txt", *CHUNKED, "-o", "a.npy") == 1
    assert "a.txt, line 11: the text has 62 tokens" in capsys.readouterr().err
    assert Path("a.npy.partial").is_dir()
    return texts


def test_a_mistake_far_in_the_file_can_be_mended_there(model, stopped, count_texts):
    write_lines("a.txt", stopped)
    assert embed(model, "a.txt", *CHUNKED, "-o", "a.npy") == 0
    assert count_texts == [4]
    assert embed(model, "a.txt", *CHUNKED, "-o", "b.npy") == 0
    assert Path("a.npy").read_bytes() == Path("b.npy").read_bytes()
    assert not Path("a.npy.partial").exists()


def test_truncate_can_be_added_later_but_not_taken_back(model, stopped, capsys, count_texts):
    lines = Path("a.txt").read_text() + " ".join(["sea"] * 60) + "\n{"
    Path("a.txt").write_text(lines)
    with Path("a.txt").open("ab") as file:
        file.write(b"\xff")
    assert embed(model, "a.txt", *CHUNKED, "--truncate", "-o", "a.npy") == 1
    assert "line 14: not UTF-8" in capsys.readouterr().err
    assert count_texts == [4]
    assert embed(model, "a.txt", *CHUNKED, "-o", "a.npy") == 1
    assert "--truncate and 1 text was cut" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dimensions", 8], "--dimensions was not given and is 8"),
        (["--prompt", "x"], "--prompt was not given and is 'x'"),
        (["--output-dtype", "int8"], "--output-dtype was 'float32' and is 'int8'"),
        (["--deterministic"], "--deterministic was not given and is True"),
        (["--chunk-size", 5], "--chunk-size was 4 and is 5"),
    ],
)
def test_other_options_are_refused(model, stopped, capsys, arguments, message):
    assert embed(model, "a.txt", *CHUNKED, "-o", "a.npy", *arguments) == 1
    error = capsys.readouterr().err
    assert f"a.npy.partial was begun with something else: {message}. " in error
    assert "--restart to begin afresh" in error


def test_another_model_is_refused(stopped, tmp_path, capsys):
    other = save_bert(tmp_path / "other", seed=1)
    assert embed(other, "a.txt", *CHUNKED, "-o", "a.npy") == 1
    assert "was begun with something else: MODEL has other content." in capsys.readouterr().err


def test_one_changed_weight_is_another_model(model, stopped, tmp_path, capsys, count_texts):
    def nudge(tensors):
        tensors[max(tensors)].view(-1)[-1] += 1e-3
        return tensors

    write_lines("a.txt", stopped)
    same, changed = copy(model, tmp_path / "same"), copy(model, tmp_path / "changed")
    edit_tensors(changed, nudge)
    assert embed(changed, "a.txt", *CHUNKED, "-o", "a.npy") == 1
    assert "MODEL has other content" in capsys.readouterr().err
    assert embed(same, "a.txt", *CHUNKED, "-o", "a.npy") == 0
    assert count_texts == [4]


def test_another_input_is_refused(model, stopped, capsys):
    write_lines("a.txt", [*stopped[:5], "other", *stopped[6:]])
    assert embed(model, "a.txt", *CHUNKED, "-o", "a.npy") == 1
    assert "a.txt differs at lines 5 to 8 from what a.npy.partial was begun with" in (
        capsys.readouterr().err
    )
    write_lines("a.txt", stopped[:4])
    assert embed(model, "a.txt", *CHUNKED, "-o", "a.npy") == 1
    assert "a.txt differs at its end from" in capsys.readouterr().err


def test_restart_begins_afresh(model, stopped, count_texts):
    write_lines("a.txt", stopped)
    options = [*CHUNKED, "--dimensions", 8, "-o", "a.npy"]
    assert embed(model, "a.txt", *options, "--restart") == 0
    assert count_texts == [4, 4, 4]
    assert np.load("a.npy").shape == (12, 8)


def test_a_full_disk_is_survived(model, capsys):
    write_lines("a.txt", sentences(400))
    options = ["--chunk-size", 64, "-o", "a.npy"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        code = embed(model, "a.txt", *options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert capsys.readouterr().err == "error: cannot write a.npy: File too large\n"
    assert not Path("a.npy").exists()
    assert embed(model, "a.txt", *options) == 0
    assert np.load("a.npy").shape == (400, DIMENSIONS)


def start(model, *arguments):
    command = [sys.executable, "-m", "rose", "embed", model, "--max-batch-tokens", 256, *arguments]
    # The last bits of a vector depend on the number of threads, which this process has set to 1.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [str(word) for word in command], env=environment, stderr=subprocess.PIPE, text=True
    )


def done_chunks():
    journal = Path("a.jsonl.partial") / "chunks.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def wait_for_chunks(process, count):
    """Wait until so many chunks are done, or the process is."""
    while process.poll() is None and done_chunks() < count:
        time.sleep(0.002)


def test_killed_and_interrupted_it_goes_on_to_the_same_bytes(model):
    rows = [{"id": i, "text": text} for i, text in enumerate(sentences(800))]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job = ["in.jsonl", "--keep", "id", "--chunk-size", 8]
    assert embed(model, *job, "-o", "whole.jsonl") == 0

    process = start(model, *job, "-o", "a.jsonl")
    wait_for_chunks(process, random.Random().randint(1, 20))
    time.sleep(random.Random().uniform(0, 0.02))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    killed_at = done_chunks()

    process = start(model, *job, "-o", "a.jsonl")
    wait_for_chunks(process, killed_at + 3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error.splitlines()[-1] == (
        f"stopped: {done_chunks() * 8} texts are done and kept in a.jsonl.partial; "
        "the same command goes on from there"
    )

    assert 0 < killed_at < done_chunks() < 100
    assert embed(model, *job, "-o", "a.jsonl") == 0
    assert Path("a.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert not Path("a.jsonl.partial").exists()
