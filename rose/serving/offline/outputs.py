"""Writes vectors as .npy, .jsonl or .parquet: chunk by chunk, then all of them joined.

Shape letters: B texts of a chunk, D numbers of a vector.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import date, time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from rose.serving.offline.errors import InputError, OutputError

if TYPE_CHECKING:
    import pyarrow as pa

    from rose.serving.offline.chunks import Chunk

INDEX_COLUMN = "index"
EMBEDDING_COLUMN = "embedding"
ROW_GROUP_BYTES = 64 << 20

Vectors = npt.NDArray[Any]
WriteChunk = Callable[[BinaryIO, Vectors], None]


class Output(Protocol):
    """A file format for vectors."""

    def prepare(self, chunk: "Chunk") -> WriteChunk:
        """Convert the columns that are copied, before any work is put into the texts.

        Called for every chunk in order, also for those that an earlier run has written. Returns
        the function that writes the chunk once its vectors are there.

        Raises:
            InputError: the columns cannot be written in this format.
        """
        ...

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Write all chunks as one file."""
        ...


def output_for(path: Path, keep: Sequence[str]) -> Output:
    """Choose the format by the name of the output.

    Raises:
        OutputError: an unknown format, or one that cannot hold the columns to keep.
    """
    formats: dict[str, Callable[[], Output]] = {
        ".npy": NpyOutput,
        ".jsonl": JsonlOutput,
        ".parquet": ParquetOutput,
    }
    suffix = path.suffix.lower()
    if suffix not in formats:
        known = ", ".join(formats)
        raise OutputError(f"{path}: the output's name must end in one of {known}")
    if suffix == ".npy" and keep:
        raise OutputError(
            f"--keep: {path} holds nothing but vectors; choose a .jsonl or .parquet output"
        )
    own = (EMBEDDING_COLUMN,) if suffix == ".parquet" else (INDEX_COLUMN, EMBEDDING_COLUMN)
    if taken := [name for name in keep if name in own]:
        raise OutputError(f"--keep: the output has a column {taken[0]!r} of its own")
    return formats[suffix]()


class NpyOutput:
    """One matrix [texts, D] for `numpy.load`."""

    def prepare(self, chunk: "Chunk") -> WriteChunk:  # noqa: ARG002 - nothing is copied
        """Return the function that writes a matrix."""
        return _write_matrix

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Write one header, then the numbers of all parts."""
        first = np.load(parts[0], mmap_mode="r")
        rows = sum(len(np.load(part, mmap_mode="r")) for part in parts)
        _write_header(file, first.dtype, (rows, first.shape[1]))
        for part in parts:
            file.write(np.load(part).data)


def _write_matrix(file: BinaryIO, vectors_BD: Vectors) -> None:
    _write_header(file, vectors_BD.dtype, vectors_BD.shape)
    file.write(vectors_BD.data)


def _write_header(file: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    # numpy's own writer of arrays hides the reason when a disk is full.
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


class JsonlOutput:
    """One object a line: index, the columns kept, embedding."""

    def prepare(self, chunk: "Chunk") -> WriteChunk:
        """Return the function that writes a line per text.

        Raises:
            InputError: a value that JSON cannot hold.
        """
        heads = [
            b'{"index":%d,%b' % (index, json_fields(row))
            for index, row in enumerate(chunk.kept_rows(), chunk.first)
        ]
        return partial(_write_lines, heads)

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Put the parts one after another."""
        for part in parts:
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, file)


def _write_lines(heads: list[bytes], file: BinaryIO, vectors_BD: Vectors) -> None:
    """Write a line per text; numbers have as many digits as their type needs."""
    import orjson

    for head, vector_D in zip(heads, vectors_BD, strict=True):
        numbers = orjson.dumps(vector_D, option=orjson.OPT_SERIALIZE_NUMPY)
        file.write(b'%b"embedding":%b}\n' % (head, numbers))


def json_fields(row: dict[str, Any]) -> bytes:
    """Write columns as the first fields of an object, each with a comma behind it.

    Raises:
        InputError: a value that JSON cannot hold.
    """
    fields = []
    for name, value in row.items():
        try:
            text = json.dumps(
                value,
                ensure_ascii=False,
                allow_nan=False,
                separators=(",", ":"),
                default=_json_default,
            )
        except (TypeError, ValueError) as error:
            raise InputError(
                f"--keep: column {name!r} has a value that JSON cannot hold: {error}; "
                "choose a .parquet output"
            ) from error
        fields.append(f"{json.dumps(name, ensure_ascii=False)}:{text},")
    return "".join(fields).encode()


def _json_default(value: object) -> str:
    """Write dates and times as ISO 8601; nothing else has one obvious text."""
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


class ParquetOutput:
    """The columns kept, then a column of fixed-size lists."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None

    def prepare(self, chunk: "Chunk") -> WriteChunk:
        """Widen the output's types to hold the columns kept; return what writes a small file.

        Raises:
            InputError: a column's type does not go with that of earlier chunks.
        """
        import pyarrow as pa

        table = chunk.kept_table()
        schemas = [self._schema or table.schema, table.schema]
        try:
            self._schema = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise InputError(f"--keep: a column is of no single type: {error}") from error
        return partial(_write_table, table)

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Write the parts into one file, in row groups of about 64 MiB."""
        from pyarrow import parquet

        assert self._schema is not None, "every chunk was prepared"
        vectors = parquet.read_schema(parts[0]).field(EMBEDDING_COLUMN)
        schema = self._schema.append(vectors)
        with parquet.ParquetWriter(file, schema, use_dictionary=self._schema.names) as writer:
            for table in _row_groups(parts, schema):
                writer.write_table(table, row_group_size=table.num_rows)


def _write_table(kept: "pa.Table", file: BinaryIO, vectors_BD: Vectors) -> None:
    """Write a small parquet file.

    Raises:
        InputError: a column is of a type that parquet does not have.
    """
    import pyarrow as pa
    from pyarrow import parquet

    flat = pa.array(vectors_BD.reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, vectors_BD.shape[1])
    table = pa.table([*kept.columns, vectors], names=[*kept.column_names, EMBEDDING_COLUMN])
    try:
        parquet.write_table(table, file, use_dictionary=kept.column_names)
    except pa.ArrowException as error:
        raise InputError(f"--keep: {error}") from error


def _row_groups(parts: Sequence[Path], schema: "pa.Schema") -> Iterator["pa.Table"]:
    """Yield the parts' rows in the final schema, several parts at a time."""
    import pyarrow as pa

    group = [schema.empty_table()]
    for part in parts:
        group.append(_read_part(part))
        if sum(table.nbytes for table in group) >= ROW_GROUP_BYTES:
            yield pa.concat_tables(group, promote_options="permissive")
            group = [schema.empty_table()]
    if len(group) > 1:
        yield pa.concat_tables(group, promote_options="permissive")


def _read_part(part: Path) -> "pa.Table":
    from pyarrow import parquet

    with parquet.ParquetFile(part) as file:
        return file.read()
