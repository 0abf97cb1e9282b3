"""Files that `rose embed` reads and writes, and the work in progress beside them."""

import csv
import io
import itertools
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rose.serving.offline import outputs as outputs_module
from rose.serving.offline.chunks import Chunk, cut_chunks
from rose.serving.offline.errors import InputError, OutputError
from rose.serving.offline.outputs import output_for
from rose.serving.offline.partial import DoneChunk, open_partial
from rose.serving.offline.progress import Meter, PlainDisplay, open_display
from rose.serving.offline.sources import Row, open_source

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\ufeff"))
SCALAR = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
fast = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module")
def scratch():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def texts_of(path, **options):
    return [row.text for row in open_source(str(path), **options).rows]


# Reading


@fast
@given(st.lists(LINE), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_lines_of_a_text_file_are_its_texts(scratch, texts, end, last_end, mark):
    raw = ("\ufeff" if mark else "") + end.join(texts) + (end if last_end and texts else "")
    (scratch / "a.txt").write_bytes(raw.encode())
    expected = texts if last_end or not texts or texts[-1] else texts[:-1]
    assert texts_of(scratch / "a.txt") == expected


def test_a_blank_line_is_an_empty_text(tmp_path):
    (tmp_path / "a.txt").write_text("a\n\n\nb\n")
    source = open_source(str(tmp_path / "a.txt"))
    assert [(row.text, row.place) for row in source.rows] == [("a", 1), ("", 2), ("", 3), ("b", 4)]


def test_standard_input_is_lines(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo")))
    source = open_source("-")
    assert [row.text for row in source.rows] == ["one", "two"]
    assert source.total is None
    assert source.where(2) == "standard input, line 2"


@fast
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1))
def test_csv_gives_back_what_was_written(scratch, pairs):
    with (scratch / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "text"), *pairs])
    rows = list(open_source(str(scratch / "a.csv"), keep=["id"]).rows)
    assert [(row.kept["id"], row.text) for row in rows] == pairs
    assert rows[-1].done == (scratch / "a.csv").stat().st_size


@fast
@given(st.lists(st.tuples(SCALAR, TEXT), min_size=1), st.booleans())
def test_jsonl_gives_back_what_was_written(scratch, pairs, ascii_only):
    lines = [json.dumps({"id": i, "text": t}, ensure_ascii=ascii_only) for i, t in pairs]
    (scratch / "a.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    rows = list(open_source(str(scratch / "a.jsonl"), keep=["id"]).rows)
    assert [(row.kept["id"], row.text) for row in rows] == pairs


@fast
@given(st.lists(TEXT, min_size=1))
def test_jsonl_of_strings(scratch, texts):
    (scratch / "s.jsonl").write_text("\n".join(map(json.dumps, texts)))
    assert texts_of(scratch / "s.jsonl") == texts


@fast
@given(
    st.lists(st.tuples(st.none() | st.integers(-5, 5), TEXT)),
    st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]),
    st.integers(1, 7),
)
def test_parquet_gives_back_what_was_written(scratch, pairs, kind, group):
    table = pa.table(
        {
            "id": pa.array([i for i, _ in pairs], pa.int16()),
            "text": pa.array([t for _, t in pairs], pa.string()).cast(kind),
        }
    )
    parquet.write_table(table, scratch / "a.parquet", row_group_size=group)
    source = open_source(str(scratch / "a.parquet"), keep=["id"])
    rows = list(source.rows)
    assert [row.text for row in rows] == [t for _, t in pairs]
    assert [row.place for row in rows] == list(range(1, len(pairs) + 1))
    assert source.total == len(pairs)
    if rows:
        assert Chunk(0, rows).kept_table().equals(table.select(["id"]).combine_chunks())


def test_a_line_is_counted_from_where_its_record_starts(tmp_path):
    (tmp_path / "a.csv").write_text('text,n\n\n"two\nlines",1\nthird,2\n')
    assert [row.place for row in open_source(str(tmp_path / "a.csv")).rows] == [3, 5]


@pytest.mark.parametrize(
    ("header", "column", "found"),
    [
        ("a,text", None, "text"),
        ("words", None, "words"),
        ("a,b", "b", "b"),
    ],
)
def test_the_column_of_the_texts(tmp_path, header, column, found):
    (tmp_path / "a.csv").write_text(f"{header}\n")
    assert open_source(str(tmp_path / "a.csv"), column=column).column == found


def test_the_only_column_of_strings_is_the_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1, "title": "x"}\n')
    assert open_source(str(tmp_path / "a.jsonl")).column == "title"
    parquet.write_table(pa.table({"n": [1], "title": ["x"]}), tmp_path / "a.parquet")
    assert open_source(str(tmp_path / "a.parquet")).column == "title"


def test_a_csv_field_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_text(f"text\n{'x' * 300_000}\n")
    assert len(texts_of(tmp_path / "a.csv")[0]) == 300_000


BAD_FILES = [
    ("a.txt", b"fine\n\xff\xfe\n", {}, r"a.txt, line 2: not UTF-8: byte 1 of the line is 0xff"),
    ("a.txt", b"x", {"column": "c"}, r"--column: .*a.txt has no columns, a line is a text"),
    ("a.txt", b"x", {"keep": ["c"]}, r"--keep: .*a.txt has no columns"),
    ("a.doc", b"x", {}, r"a.doc: the input's name must end in one of .txt, .jsonl, .csv, .parquet"),
    ("a.csv", b"", {}, r"a.csv is empty: a header line"),
    ("a.csv", b"a,b\n1,2\n", {}, r"a.csv: which column holds the texts\? .*--column.*: a, b"),
    ("a.csv", b"a,b\n1,2\n", {"column": "c"}, r"a.csv: there is no column 'c'; it has: a, b"),
    (
        "a.csv",
        b"text\n1\n",
        {"keep": ["c"]},
        r"a.csv: --keep: there is no column 'c'; it has: text",
    ),
    ("a.csv", b"text,text\n1,2\n", {}, r"a.csv, line 1: two columns are called 'text'"),
    ("a.csv", b"text,b\n1,2\n3\n", {}, r"a.csv, line 3: 1 fields, the header has 2"),
    ("a.csv", b'text\nfine\n"open\nx\n', {}, r"a.csv, line 3: bad CSV: unexpected end of data"),
    ("a.csv", b'text\n"a"b\n', {}, r"a.csv, line 2: bad CSV: "),
    ("a.csv", b"text\ncaf\xe9\n", {}, r"a.csv, line 2: not UTF-8: byte 4 of the line is 0xe9"),
    ("a.jsonl", b"\n \n", {}, r"a.jsonl is empty: a string or an object a line is expected"),
    ("a.jsonl", b'"a"\n{"text": 1}', {}, r"line 2: a string is expected, .*; found an object"),
    ("a.jsonl", b'"a"\n', {"column": "c"}, r"--column: .*a.jsonl has no columns"),
    (
        "a.jsonl",
        b"\n3\n",
        {},
        r"a.jsonl, line 1: a string or an object is expected, found a number",
    ),
    ("a.jsonl", b'{"text": "a"}\n\n"b"', {}, r"line 3: an object is expected, .*; found a string"),
    ("a.jsonl", b'{"text": "a"}\n{"x": 1}', {}, r"line 2: column 'text' is missing; .* has: x"),
    (
        "a.jsonl",
        b'{"text": "a"}',
        {"keep": ["id"]},
        r"line 1: column 'id' is missing; .* has: text",
    ),
    ("a.jsonl", b'{"text": null}', {}, r"line 1: column 'text': a text is expected, found null"),
    ("a.jsonl", b'{"text": ["a"]}', {}, r"line 1: column 'text': a text is expected, found a list"),
    ("a.jsonl", b'{"a": "x", "b": "y"}', {}, r"a.jsonl: which column .* it has: a, b"),
    ("a.jsonl", b'"a"\n{"text": }', {}, r"line 2: bad JSON: .*, at character 10"),
    ("a.jsonl", b'"a"\n"\\ud800"', {}, r"line 2: bad JSON: an escape is half of a surrogate pair"),
    ("a.jsonl", b'"a"\n' + b"[" * 100_000, {}, r"line 2: bad JSON: nested too deeply"),
    ("a.jsonl", b'{"text": "a", "n": NaN}', {}, r"line 1: bad JSON: NaN is no JSON"),
    (
        "a.jsonl",
        b'{"text": "a", "n": 1e999}',
        {},
        r"line 1: bad JSON: the number 1e999 is too large",
    ),
    ("a.parquet", b"PAR1 no", {}, r"a.parquet: not a parquet file that can be read: "),
]


@pytest.mark.parametrize(("name", "content", "options", "message"), BAD_FILES)
def test_what_is_wrong_with_a_file_is_said_with_its_place(
    tmp_path, name, content, options, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        texts_of(tmp_path / name, **options)


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no\.txt does not exist"):
        open_source(str(tmp_path / "no.txt"))
    with pytest.raises(InputError, match="is not a file"):
        open_source(str(tmp_path))


def test_nulls_and_other_types_in_parquet_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a", None]}), path)
    with pytest.raises(InputError, match=r"row 2, column 'text': a text is expected, found null"):
        texts_of(path)
    with pytest.raises(InputError, match=r"there is no column 'b'; it has: text"):
        open_source(str(path), column="b")
    with pytest.raises(InputError, match=r"--keep: there is no column 'b'"):
        open_source(str(path), keep=["b"])
    parquet.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(InputError, match=r"column 'text': texts are expected, found int64"):
        open_source(str(path))
    broken = pa.array([b"ok", b"\xff"]).view(pa.string())
    parquet.write_table(pa.table({"text": broken}), path)
    with pytest.raises(InputError, match=r"row 2, column 'text': not UTF-8"):
        texts_of(path)


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [f"text {i}" for i in range(5000)]}), path)
    raw = bytearray(path.read_bytes())
    raw[4:2000] = os.urandom(1996)
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"a\.parquet: not a parquet file that can be read"):
        texts_of(path)


# Cutting into chunks


@fast
@given(st.lists(TEXT), st.integers(1, 5), st.integers(0, 40))
def test_chunks_hold_all_rows_within_the_limits(texts, max_rows, max_chars):
    rows = [Row(text, i, i) for i, text in enumerate(texts, 1)]
    chunks = list(cut_chunks(rows, max_rows, max_chars))
    assert list(itertools.chain.from_iterable(c.rows for c in chunks)) == rows
    assert [c.first for c in chunks] == [c.rows[0].place - 1 for c in chunks]
    for chunk in chunks:
        assert len(chunk.rows) <= max_rows
        assert len(chunk.rows) == 1 or sum(map(len, chunk.texts)) <= max_chars


def test_a_digest_depends_on_texts_and_kept_columns(tmp_path):
    def digest(*rows):
        return Chunk(0, [Row(text, 1, 1, {"k": kept}) for text, kept in rows]).digest()

    same = digest(("ab", 1), ("c", 2))
    assert same == digest(("ab", 1), ("c", 2))
    others = [digest(("a", 1), ("bc", 2)), digest(("ab", 1), ("c", 3)), digest(("ab", 1))]
    assert len({same, *others}) == 4
    parquet.write_table(pa.table({"text": ["a", "b"], "k": [None, [1]]}), tmp_path / "a.parquet")
    digests = {
        Chunk(0, list(open_source(str(tmp_path / "a.parquet"), keep=keep).rows)).digest()
        for keep in ([], ["k"], ["k"])
    }
    assert len(digests) == 2


# Writing


def write(folder, name, chunks, matrix):
    """Write chunks of rows with the rows of `matrix`, and return the path of the joined file."""
    output = output_for(folder / name, [])
    parts = []
    for number, chunk in enumerate(chunks):
        writer = output.prepare(chunk)
        parts.append(folder / f"{number}.chunk")
        with parts[-1].open("wb") as file:
            writer(file, matrix[chunk.first : chunk.first + len(chunk.rows)])
    with (folder / name).open("wb") as file:
        output.join(parts, file)
    return folder / name


@st.composite
def matrices(draw):
    kinds = [np.float32, np.float16, np.int8, np.uint8]
    kind = draw(st.sampled_from(kinds))
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 5)))
    seed = draw(st.integers(0, 2**32 - 1))
    return (np.random.default_rng(seed).normal(size=shape) * 100).clip(0, 120).astype(kind)


@fast
@given(matrices(), st.integers(1, 4), st.data())
def test_outputs_give_back_vectors_and_columns(scratch, matrix, max_rows, data):
    kept = data.draw(st.lists(st.none() | TEXT, min_size=len(matrix), max_size=len(matrix)))
    rows = [Row("t", i, i, {"k": value}) for i, value in enumerate(kept)]
    chunks = list(cut_chunks(rows, max_rows, 100))

    loaded = np.load(write(scratch, "a.npy", chunks, matrix))
    assert loaded.dtype == matrix.dtype
    assert np.array_equal(loaded, matrix)

    lines = write(scratch, "a.jsonl", chunks, matrix).read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    objects = [json.loads(line) for line in lines]
    assert [list(o) for o in objects] == [["index", "k", "embedding"]] * len(matrix)
    assert [o["index"] for o in objects] == list(range(len(matrix)))
    assert [o["k"] for o in objects] == kept
    assert np.array_equal(np.array([o["embedding"] for o in objects], matrix.dtype), matrix)

    table = parquet.read_table(write(scratch, "a.parquet", chunks, matrix))
    assert table.column_names == ["k", "embedding"]
    assert table["k"].to_pylist() == kept
    kind = table["embedding"].type
    assert pa.types.is_fixed_size_list(kind)
    assert kind.value_type.to_pandas_dtype() == matrix.dtype.type
    flat = table["embedding"].combine_chunks().values.to_numpy()
    assert np.array_equal(flat.reshape(matrix.shape), matrix)


def test_jsonl_copies_values_as_they_are(tmp_path):
    values = [{"k": [1, {"é": None}]}, {"k": 2**80}, {"k": 0.1}, {"k": "\u2028"}, {"k": False}]
    rows = [Row("", i, i, value) for i, value in enumerate(values)]
    path = write(tmp_path, "a.jsonl", [Chunk(0, rows)], np.zeros((5, 1), np.float32))
    objects = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [{"k": o["k"]} for o in objects] == values


def test_parquet_widens_types_over_chunks(tmp_path):
    kept = [{"a": None, "b": [1]}, {"a": 1, "b": []}, {"a": 2.5, "b": None}]
    chunks = [Chunk(i, [Row("", i, i, value)]) for i, value in enumerate(kept)]
    table = parquet.read_table(write(tmp_path, "a.parquet", chunks, np.ones((3, 2), np.float32)))
    assert table.select(["a", "b"]).to_pylist() == kept


def test_parquet_keeps_the_types_of_a_parquet_input(tmp_path):
    kept = pa.table(
        {
            "t": pa.array([1, 2, None], pa.timestamp("ns", "UTC")),
            "d": pa.array(["x", "y", "x"]).dictionary_encode(),
            "l": pa.array([[1], None, []], pa.list_(pa.int8())),
            "s": pa.array([{"a": 1}, None, {"a": None}]),
        }
    )
    path = tmp_path / "in.parquet"
    parquet.write_table(kept.append_column("text", [["a", "b", "c"]]), path)
    rows = open_source(str(path), keep=kept.column_names).rows
    output = write(tmp_path, "a.parquet", cut_chunks(rows, 2, 9), np.ones((3, 2), np.float32))
    found = parquet.read_table(output).select(kept.column_names)
    assert found.drop("d").equals(kept.drop("d"))
    assert found["d"].to_pylist() == ["x", "y", "x"]
    assert found.schema.equals(kept.schema)


def test_parquet_to_jsonl(tmp_path):
    moment = datetime(2024, 2, 29, 12, tzinfo=UTC)
    table = pa.table({"text": ["a"], "when": [moment], "n": [1]})
    parquet.write_table(table, tmp_path / "in.parquet")
    rows = list(open_source(str(tmp_path / "in.parquet"), keep=["when", "n"]).rows)
    path = write(tmp_path, "a.jsonl", [Chunk(0, rows)], np.zeros((1, 1), np.float32))
    assert json.loads(path.read_text()) == {
        "index": 0,
        "when": "2024-02-29T12:00:00+00:00",
        "n": 1,
        "embedding": [0.0],
    }


def test_parquet_row_groups_are_of_a_good_size(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs_module, "ROW_GROUP_BYTES", 100)
    chunks = [Chunk(i, [Row("", i, i)]) for i in range(10)]
    path = write(tmp_path, "a.parquet", chunks, np.ones((10, 10), np.float32))
    groups = parquet.read_metadata(path)
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [3, 3, 3, 1]


@pytest.mark.parametrize(
    ("name", "keep", "message"),
    [
        ("a.bin", [], r"a.bin: the output's name must end in one of .npy, .jsonl, .parquet"),
        ("a.npy", ["id"], r"--keep: .*a.npy holds nothing but vectors"),
        ("a.jsonl", ["index"], r"--keep: the output has a column 'index' of its own"),
        ("a.parquet", ["embedding"], r"--keep: the output has a column 'embedding' of its own"),
    ],
)
def test_outputs_that_cannot_be(name, keep, message):
    with pytest.raises(OutputError, match=message):
        output_for(Path(name), keep)


def test_columns_that_an_output_cannot_hold(tmp_path):
    def prepare(name, *kept):
        output = output_for(Path(name), [])
        for i, value in enumerate(kept):
            output.prepare(Chunk(i, [Row("", 1, 1, {"k": value})]))

    with pytest.raises(InputError, match=r"column 'k' has a value that JSON cannot hold"):
        prepare("a.jsonl", b"raw")
    with pytest.raises(InputError, match=r"column 'k' has a value that JSON cannot hold"):
        prepare("a.jsonl", float("nan"))
    with pytest.raises(InputError, match=r"a column is of no single type: .*k"):
        prepare("a.parquet", 1, "one")
    with pytest.raises(InputError, match=r"column 'k' is of no single type"):
        output_for(Path("a.parquet"), []).prepare(
            Chunk(0, [Row("", 1, 1, {"k": 1}), Row("", 2, 2, {"k": "x"})])
        )
    with pytest.raises(InputError, match=r"--keep: "):
        write(
            tmp_path,
            "a.parquet",
            [Chunk(0, [Row("", 1, 1, {"k": {}})])],
            np.zeros((1, 1), np.float32),
        )


# Work in progress

FACTS = {"--dimensions": 8, "--keep": ["a"], "MODEL": "abc"}


def add(partial, content=b"x", **changes):
    chunk = DoneChunk(**({"rows": 2, "tokens": 5, "cut": 0, "digest": "d"} | changes))
    partial.add(chunk, lambda file: file.write(content))


def join(parts, file):
    for part in parts:
        file.write(part.read_bytes())


def test_chunks_are_found_again_and_joined(tmp_path):
    output = tmp_path / "out.npy"
    with open_partial(output) as partial:
        partial.resume(FACTS)
        add(partial, b"one ")
        add(partial, b"two ", rows=3)
    with open_partial(output) as partial:
        partial.resume(FACTS)
        assert [c.rows for c in partial.chunks] == [2, 3]
        assert partial.rows == 5
        add(partial, b"three")
        partial.finish(join)
    assert output.read_bytes() == b"one two three"
    assert list(tmp_path.iterdir()) == [output]


def test_nothing_is_left_of_work_that_did_nothing(tmp_path):
    with open_partial(tmp_path / "out.npy") as partial:
        partial.resume(FACTS)
    assert list(tmp_path.iterdir()) == []


def test_a_torn_journal_and_stray_files_are_no_harm(tmp_path):
    output = tmp_path / "out.npy"
    with open_partial(output) as partial:
        partial.resume(FACTS)
        for content in (b"one ", b"two ", b"three "):
            add(partial, content)
    folder = tmp_path / "out.npy.partial"
    journal = folder / "chunks.jsonl"
    journal.write_bytes(journal.read_bytes()[:-7])  # the line of the third chunk, torn
    (folder / "scratch").write_bytes(b"half of a chu")
    with open_partial(output) as partial:
        partial.resume(FACTS)
        assert len(partial.chunks) == 2
        add(partial, b"3")
    with open_partial(output) as partial:
        partial.resume(FACTS)
        assert len(partial.chunks) == 3
        partial.finish(join)
    assert output.read_bytes() == b"one two 3"


def test_a_journal_line_without_its_chunk_does_not_count(tmp_path):
    output = tmp_path / "out.npy"
    with open_partial(output) as partial:
        partial.resume(FACTS)
        add(partial)
        add(partial)
    (tmp_path / "out.npy.partial" / "00000001.chunk").unlink()
    with open_partial(output) as partial:
        partial.resume(FACTS)
        assert len(partial.chunks) == 1


def test_other_facts_are_refused_with_what_differs(tmp_path):
    output = tmp_path / "out.npy"
    with open_partial(output) as partial:
        partial.resume(FACTS)
        add(partial)
    other = {**FACTS, "--dimensions": None, "--keep": ["b"], "MODEL": "x"}
    with (
        pytest.raises(OutputError) as caught,
        open_partial(output) as partial,
    ):
        partial.resume(other)
    assert str(caught.value) == (
        f"{output}.partial was begun with something else: --dimensions was 8 and is not given; "
        "--keep was ['a'] and is ['b']; MODEL has other content. "
        "Give the same again to go on, or --restart to begin afresh."
    )
    with open_partial(output) as partial:
        partial.clear()
        partial.resume(other)
        assert partial.chunks == []


def test_two_processes_do_not_write_the_same_output(tmp_path):
    with (
        open_partial(tmp_path / "out.npy"),
        pytest.raises(OutputError, match=r"another process is writing .*out\.npy"),
        open_partial(tmp_path / "out.npy"),
    ):
        pytest.fail("the lock was given twice")


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OutputError, match=r"cannot write .*out\.npy\.partial: Not a directory"),
        open_partial(tmp_path / "file" / "out.npy"),
    ):
        pytest.fail("a folder was made in a file")


def test_a_full_disk_leaves_what_is_done(tmp_path):
    def full(file):
        file.write(b"some")
        raise OSError(28, "No space left on device")

    output = tmp_path / "out.npy"
    with open_partial(output) as partial:
        partial.resume(FACTS)
        add(partial, b"one")
        with pytest.raises(OutputError, match=r"cannot write .*00000001\.chunk: No space left"):
            partial.add(DoneChunk(1, 1, 0, ""), full)
    with open_partial(output) as partial:
        partial.resume(FACTS)
        assert len(partial.chunks) == 1
        with pytest.raises(OutputError, match=r"cannot write .*out\.npy: No space left"):
            partial.finish(lambda _, file: full(file))
        assert not output.exists()
        partial.finish(join)
    assert output.read_bytes() == b"one"


def test_the_manifest_is_plain_json(tmp_path):
    with open_partial(tmp_path / "out.npy") as partial:
        partial.resume(FACTS)
        add(partial)
    raw = (tmp_path / "out.npy.partial" / "manifest.json").read_bytes()
    assert msgspec.json.decode(raw) == FACTS


# Progress


def test_the_rates_count_this_run_alone():
    meter = Meter(total=1000, texts_before=50, done_before=500.0, began=100.0)
    meter.texts, meter.tokens, meter.done = 10, 2000, 600.0
    assert meter.fraction == 0.6
    assert meter.describe(110.0) == "60 texts, 1 texts/s, 200 tokens/s, about 40 s left"


def test_of_an_unknown_total_nothing_is_foretold():
    meter = Meter(total=None, texts=3600, tokens=7200, began=0.0)
    assert meter.fraction is None
    assert meter.describe(3600.0) == "3,600 texts, 1 texts/s, 2 tokens/s"


@pytest.mark.parametrize(("left", "words"), [(89, "89 s"), (600, "10 min"), (7200, "2.0 h")])
def test_the_time_left_in_words(left, words):
    meter = Meter(total=left + 1, done=1.0, began=0.0)
    assert meter.describe(1.0).endswith(f"about {words} left")


def test_plain_lines_come_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rose.serving.offline.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with open_display(stream) as display:
        assert isinstance(display, PlainDisplay)
        for moment in (101.0, 109.0, 110.0, 111.0, 121.0):
            now[0] = moment
            display(Meter(total=200, done=100.0, texts=5, began=100.0))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == "50%: 5 texts, 0.5 texts/s, 0 tokens/s, about 10 s left"


def test_a_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with open_display(stream) as display:
        display(Meter(total=200, done=100.0, texts=5))
        display(Meter(total=200, done=200.0, texts=12345))
    assert "12,345 texts" in stream.getvalue()
    assert "100%" in stream.getvalue()
