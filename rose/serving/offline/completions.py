"""Results of `rose generate`: saved in the order in which they end, written in that of the input.

A record is what came of one row. Rows end in about the order of the input, so to put them in order
takes no more memory than for those that overtook the slowest.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec

from rose.serving.offline.chunks import Chunk
from rose.serving.offline.errors import InputError, OutputError
from rose.serving.offline.outputs import INDEX_COLUMN, ParquetOutput, json_fields

if TYPE_CHECKING:
    import pyarrow as pa


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of row `index`: a completion, or else `error`. `digest` is that of its prompt."""

    index: int
    digest: str
    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None


# Consecutive rows with the columns that are copied, None where there are none.
Group = tuple[Chunk | None, Sequence[Record]]

_FACTS = ("finish_reason", "prompt_tokens", "completion_tokens")
ERROR_COLUMN = "error"


def save_records(records: Iterable[Record], file: BinaryIO) -> None:
    """Write records for `read_records`."""
    file.write(msgspec.json.Encoder().encode_lines(records))


def read_records(paths: Iterable[Path]) -> Iterator[Record]:
    """Read the records of several files, one at a time."""
    decoder = msgspec.json.Decoder(Record)
    for path in paths:
        with path.open("rb") as file:
            yield from map(decoder.decode, file)


def in_order(records: Iterable[Record]) -> Iterator[Record]:
    """Order records by their index, which goes from 0 without a gap."""
    waiting: dict[int, Record] = {}
    index = 0
    for record in records:
        waiting[record.index] = record
        while (ready := waiting.pop(index, None)) is not None:
            yield ready
            index += 1
    assert not waiting, "a row has no record"


class CompletionOutput(Protocol):
    """A file format for completions."""

    def prepare(self, chunk: Chunk) -> object:
        """Look at the columns that are copied, before any work is put into the rows.

        Raises:
            InputError: they cannot be written in this format.
        """
        ...

    def write(self, groups: Iterable[Group], file: BinaryIO) -> None:
        """Write the file."""
        ...


def completion_output(path: Path, keep: Sequence[str], column: str) -> CompletionOutput:
    """Choose the format by the name of the output.

    Args:
        path: the output.
        keep: columns that are copied from the input.
        column: the column of the completions.

    Raises:
        OutputError: an unknown format, or two columns of one name.
    """
    formats: dict[str, Callable[[str], CompletionOutput]] = {
        ".jsonl": JsonlCompletions,
        ".parquet": ParquetCompletions,
    }
    suffix = path.suffix.lower()
    if suffix not in formats:
        raise OutputError(f"{path}: the output's name must end in one of {', '.join(formats)}")
    own = [*_FACTS, ERROR_COLUMN, *([INDEX_COLUMN] if suffix == ".jsonl" else [])]
    if column in own:
        raise OutputError(f"--output-column: the output has a column {column!r} already")
    if column in keep:
        raise OutputError(
            f"--keep: the completions are to be in a column {column!r} too; "
            "choose another name for it with --output-column"
        )
    if taken := [name for name in keep if name in own]:
        raise OutputError(f"--keep: the output has a column {taken[0]!r} of its own")
    return formats[suffix](column)


class JsonlCompletions:
    """One object a line: index, the columns kept, and the completion or an error."""

    def __init__(self, column: str) -> None:
        """Call the field of the text `column`."""
        self._column = column

    def prepare(self, chunk: Chunk) -> None:
        """Make sure that JSON can hold the columns that are kept.

        Raises:
            InputError: it cannot.
        """
        for row in chunk.kept_rows():
            json_fields(row)

    def write(self, groups: Iterable[Group], file: BinaryIO) -> None:
        """Write a line per row."""
        for chunk, records in groups:
            rows = chunk.kept_rows() if chunk is not None else [{} for _ in records]
            for row, record in zip(rows, records, strict=True):
                result = msgspec.json.encode(self._result(record)).removeprefix(b"{")
                file.write(b'{"index":%d,%b%b\n' % (record.index, json_fields(row), result))

    def _result(self, record: Record) -> dict[str, Any]:
        if record.error is not None:
            return {ERROR_COLUMN: record.error}
        return {self._column: record.text, **{name: getattr(record, name) for name in _FACTS}}


class ParquetCompletions(ParquetOutput):
    """The columns kept, then those of the completions; a row has either a text or an error."""

    def __init__(self, column: str) -> None:
        """Call the column of the texts `column`."""
        super().__init__()
        self._column = column

    def write(self, groups: Iterable[Group], file: BinaryIO) -> None:
        """Write a row group per group.

        Raises:
            InputError: a column is of a type that parquet does not have.
        """
        import pyarrow as pa
        from pyarrow import parquet

        kept = self._schema or pa.schema([])
        schema = self._table([], kept).schema
        try:
            with parquet.ParquetWriter(file, schema) as writer:
                for chunk, records in groups:
                    writer.write_table(self._table(records, kept, chunk))
        except pa.ArrowException as error:
            raise InputError(f"--keep: {error}") from error

    def _table(
        self, records: Sequence[Record], kept: "pa.Schema", chunk: Chunk | None = None
    ) -> "pa.Table":
        """Return the rows as a table, the kept columns first, in the types of `kept`."""
        import pyarrow as pa

        table = kept.empty_table()
        if chunk is not None:
            table = pa.concat_tables([table, chunk.kept_table()], promote_options="permissive")
        columns: dict[str, Any] = dict(zip(table.column_names, table.columns, strict=True))
        for field in ("text", *_FACTS, ERROR_COLUMN):
            kind = pa.int32() if field.endswith("_tokens") else pa.string()
            values = pa.array([getattr(record, field) for record in records], kind)
            columns[self._column if field == "text" else field] = values
        return pa.table(columns)
