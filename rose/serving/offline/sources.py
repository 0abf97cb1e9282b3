"""Reads texts from .txt, .jsonl, .csv and .parquet files, row by row.

Nothing here holds more than a row (or a small batch of a parquet file) at a time. Rows are counted
in the order of the file; what a message calls a line is a line of the file, from 1.
"""

import codecs
import contextlib
import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Never

from rose.serving.offline.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

STANDARD_INPUT = "-"
DEFAULT_COLUMN = "text"
PARQUET_BATCH_ROWS = 1024
PARQUET_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One text.

    `place` is its line, or its row in a parquet file, from 1. `done` is how much of the source has
    been read with it, in the unit of `Source.total`. `kept` are the other columns to copy: values
    by name, or a parquet file's own row.
    """

    text: str
    place: int
    done: int
    kept: "dict[str, Any] | pa.RecordBatch" = field(default_factory=dict)


@dataclass(slots=True)
class Source:
    """A file of texts.

    `label` names it in messages, `column` is the column that holds the texts (None where a format
    or a file has no columns), `total` what there is to read (bytes, or rows of a parquet file;
    None for standard input). `rows` can be read once. Where it `holds_lists`, a row's text is the
    JSON of a list.
    """

    label: str
    rows: Iterator[Row]
    column: str | None = None
    total: int | None = None
    unit: str = "line"
    holds_lists: bool = False

    def where(self, place: int) -> str:
        """Name the place of a row, for messages."""
        column = "" if self.column is None else f", column {self.column!r}"
        return f"{self.label}, {self.unit} {place}{column}"


def open_source(
    path: str,
    *,
    column: str | None = None,
    keep: Sequence[str] = (),
    list_column: str | None = None,
) -> Source:
    """Open a file of texts; "-" is standard input, read line by line.

    Args:
        path: a file whose suffix says its format.
        column: the column that holds the texts; None is "text", or the only column of strings.
        keep: columns to copy into `Row.kept`.
        list_column: name that a column of lists has by default. The column of a .jsonl file may
            hold lists then, if the first line has one.

    Raises:
        InputError: no such file or column, an unknown format, or a malformed head of the file.
    """
    if path == STANDARD_INPUT:
        return _open_text(path, column, tuple(keep))
    if not Path(path).is_file():
        found = "is not a file" if Path(path).exists() else "does not exist"
        raise InputError(f"{path} {found}")
    openers: dict[str, Callable[[str, str | None, tuple[str, ...]], Source]] = {
        ".txt": _open_text,
        ".jsonl": partial(_open_jsonl, list_column=list_column),
        ".csv": _open_csv,
        ".parquet": _open_parquet,
    }
    suffix = Path(path).suffix.lower()
    if suffix not in openers:
        known = ", ".join(openers)
        raise InputError(f"{path}: the input's name must end in one of {known}, or be -")
    return openers[suffix](path, column, tuple(dict.fromkeys(keep)))


def _refuse_columns(label: str, column: str | None, keep: Sequence[str]) -> None:
    if column is not None or keep:
        option = "--keep" if keep else "--column"
        raise InputError(f"{option}: {label} has no columns, a line is a text")


class Lines:
    """Lines of a UTF-8 file with their ends; a byte order mark is dropped.

    `number` lines and `consumed` bytes have been read.
    """

    def __init__(self, path: str) -> None:
        """Read the file `path`, or standard input for "-"."""
        self.label = "standard input" if path == STANDARD_INPUT else path
        self.number = 0
        self.consumed = 0
        self._path = path

    def __iter__(self) -> Iterator[str]:
        """Yield lines.

        Raises:
            InputError: a line is not UTF-8.
        """
        with self._open() as file:
            for raw in file:
                self.number += 1
                self.consumed += len(raw)
                line = raw.removeprefix(codecs.BOM_UTF8) if self.number == 1 else raw
                if line:  # a mark alone is no line
                    yield self._decode(line)

    def _open(self) -> contextlib.AbstractContextManager[BinaryIO]:
        if self._path == STANDARD_INPUT:
            return contextlib.nullcontext(sys.stdin.buffer)
        return Path(self._path).open("rb")

    def _decode(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"not UTF-8: byte {error.start + 1} of the line is 0x{raw[error.start]:02x}")

    def fail(self, message: str, line: int | None = None) -> Never:
        """Raise InputError for the present line, or another one."""
        raise InputError(f"{self.label}, line {line or self.number}: {message}")


def _open_text(path: str, column: str | None, keep: tuple[str, ...]) -> Source:
    lines = Lines(path)
    _refuse_columns(lines.label, column, keep)
    total = None if path == STANDARD_INPUT else Path(path).stat().st_size
    return Source(lines.label, _text_rows(lines), total=total)


def _text_rows(lines: Lines) -> Iterator[Row]:
    """Yield a row per line. A blank line is an empty text: row i stays line i of the file."""
    for line in lines:
        text = line.removesuffix("\n").removesuffix("\r")
        yield Row(text, lines.number, lines.consumed)


def _open_csv(path: str, column: str | None, keep: tuple[str, ...]) -> Source:
    lines = Lines(path)
    csv.field_size_limit(sys.maxsize)  # the module's own limit is 128 KiB
    records = _csv_records(lines)
    _, header = next(records, (1, []))
    if not header:
        raise InputError(f"{path} is empty: a header line with the columns' names is expected")
    if twice := sorted({name for name in header if header.count(name) > 1}):
        lines.fail(f"two columns are called {twice[0]!r}", 1)
    chosen = _choose_column(path, column, header, header)
    _check_kept(path, keep, header)
    rows = _csv_rows(lines, records, header, header.index(chosen), keep)
    return Source(path, rows, chosen, Path(path).stat().st_size)


def _csv_records(lines: Lines) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with the line on which it starts; blank lines are none."""
    reader = csv.reader(iter(lines), strict=True)
    start = 1
    try:
        for record in reader:
            if record:
                yield start, record
            start = lines.number + 1
    except csv.Error as error:
        lines.fail(f"bad CSV: {error}", start)


def _csv_rows(
    lines: Lines,
    records: Iterator[tuple[int, list[str]]],
    header: list[str],
    text: int,
    keep: tuple[str, ...],
) -> Iterator[Row]:
    kept = {name: header.index(name) for name in keep}
    for start, record in records:
        if len(record) != len(header):
            lines.fail(f"{len(record)} fields, the header has {len(header)}", start)
        values = {name: record[index] for name, index in kept.items()}
        yield Row(record[text], start, lines.consumed, values)


def _open_jsonl(
    path: str, column: str | None, keep: tuple[str, ...], *, list_column: str | None
) -> Source:
    head = list(itertools.islice(_json_values(Lines(path)), 1))
    if not head:
        raise InputError(f"{path} is empty: a string or an object a line is expected")
    lines, total, first = Lines(path), Path(path).stat().st_size, head[0]
    if isinstance(first, str):
        _refuse_columns(path, column, keep)
        return Source(path, _json_string_rows(lines), total=total)
    if not isinstance(first, dict):
        lines.fail(f"a string or an object is expected, found {_json_kind(first)}", 1)
    if column is None and DEFAULT_COLUMN not in first and list_column in first:
        column = list_column
    strings = [name for name, value in first.items() if isinstance(value, str)]
    chosen = _choose_column(path, column, list(first), strings)
    lists = list_column is not None and isinstance(first[chosen], list)
    rows = _json_object_rows(lines, chosen, keep, lists=lists)
    return Source(path, rows, chosen, total, holds_lists=lists)


def _json_values(lines: Lines) -> Iterator[object]:
    """Yield the value of each line that is not blank."""
    for line in lines:
        if not line.isspace():
            yield _parse_json(lines, line)


def _parse_json(lines: Lines, line: str) -> object:
    try:
        value = json.loads(line, parse_constant=_not_json, parse_float=_finite)
        if "\\u" in line:  # an escape may be half of a surrogate pair, which no file can hold
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        lines.fail(f"bad JSON: {error.msg}, at character {error.colno}")
    except UnicodeEncodeError:
        lines.fail("bad JSON: an escape is half of a surrogate pair")
    except RecursionError:
        lines.fail("bad JSON: nested too deeply")
    except ValueError as error:
        lines.fail(f"bad JSON: {error}")
    return value


def _not_json(name: str) -> Never:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits} is too large")
    return value


def _json_string_rows(lines: Lines) -> Iterator[Row]:
    for value in _json_values(lines):
        if not isinstance(value, str):
            lines.fail(f"a string is expected, as on the first line; found {_json_kind(value)}")
        yield Row(value, lines.number, lines.consumed)


def _json_object_rows(
    lines: Lines, column: str, keep: tuple[str, ...], *, lists: bool
) -> Iterator[Row]:
    for value in _json_values(lines):
        if not isinstance(value, dict):
            lines.fail(f"an object is expected, as on the first line; found {_json_kind(value)}")
        for name in (column, *keep):
            if name not in value:
                lines.fail(f"column {name!r} is missing; the object has: {_list(value)}")
        text = value[column]
        if not isinstance(text, list if lists else str):
            wanted = "list" if lists else "text"
            lines.fail(f"column {column!r}: a {wanted} is expected, found {_json_kind(text)}")
        if lists:
            text = json.dumps(text, ensure_ascii=False)
        yield Row(text, lines.number, lines.consumed, {name: value[name] for name in keep})


def _json_kind(value: object) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names[type(value)]


def _open_parquet(path: str, column: str | None, keep: tuple[str, ...]) -> Source:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a parquet file that can be read: {error}") from error
    schema = file.schema_arrow
    strings = [name for name in schema.names if _holds_text(schema.field(name).type)]
    chosen = _choose_column(path, column, schema.names, strings)
    if chosen not in strings:
        found = schema.field(chosen).type
        raise InputError(f"{path}: column {chosen!r}: texts are expected, found {found}")
    _check_kept(path, keep, schema.names)
    rows = _parquet_rows(path, file, chosen, keep)
    return Source(path, rows, chosen, file.metadata.num_rows, unit="row")


def _holds_text(kind: "pa.DataType") -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    checks = (types.is_string, types.is_large_string, types.is_string_view)
    return any(check(kind) for check in checks)


def _parquet_rows(
    path: str, file: "parquet.ParquetFile", column: str, keep: tuple[str, ...]
) -> Iterator[Row]:
    place = 0
    columns = list(dict.fromkeys((column, *keep)))
    for batch in _parquet_batches(path, file, columns):
        kept = batch.select(list(keep))
        for index, text in enumerate(batch.column(column)):
            place += 1
            value = _parquet_text(path, place, column, text)
            yield Row(value, place, place, kept.slice(index, 1) if keep else {})


def _parquet_batches(
    path: str, file: "parquet.ParquetFile", columns: list[str]
) -> Iterator["pa.RecordBatch"]:
    import pyarrow as pa

    try:
        with file:
            yield from file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a parquet file that can be read: {error}") from error


def _parquet_text(path: str, place: int, column: str, scalar: "pa.Scalar") -> str:
    where = f"{path}, row {place}, column {column!r}"
    try:
        text = scalar.as_py()
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8") from None
    if text is None:
        raise InputError(f"{where}: a text is expected, found null")
    return str(text)


def _choose_column(
    label: str, wanted: str | None, names: Sequence[str], strings: Sequence[str]
) -> str:
    """Return the column of the texts: as wanted, "text", or the only one that holds strings."""
    if wanted is not None:
        if wanted not in names:
            raise InputError(f"{label}: there is no column {wanted!r}; it has: {_list(names)}")
        return wanted
    if DEFAULT_COLUMN in names:
        return DEFAULT_COLUMN
    if len(strings) == 1:
        return strings[0]
    raise InputError(
        f"{label}: which column holds the texts? Choose it with --column; it has: {_list(names)}"
    )


def _check_kept(label: str, keep: Sequence[str], names: Sequence[str]) -> None:
    for name in keep:
        if name not in names:
            raise InputError(
                f"{label}: --keep: there is no column {name!r}; it has: {_list(names)}"
            )


def _list(names: Iterator[str] | Sequence[str] | dict[str, Any]) -> str:
    return ", ".join(names) or "none"
