"""Cuts an input into chunks: what is embedded, saved and found again as one piece."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rose.serving.offline.errors import InputError
from rose.serving.offline.sources import Row

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows; `first` is the number of the first, from 0."""

    first: int
    rows: Sequence[Row]

    @property
    def texts(self) -> list[str]:
        """The texts, in order."""
        return [row.text for row in self.rows]

    def kept_rows(self) -> list[dict[str, Any]]:
        """Return the kept columns as Python values, a mapping per row.

        Raises:
            InputError: a value has no exact counterpart in Python.
        """
        if isinstance(self.rows[0].kept, dict):
            return [row.kept for row in self.rows]
        try:
            rows: list[dict[str, Any]] = self.kept_table().to_pylist()
        except ValueError as error:
            raise InputError(f"--keep: {error}") from error
        return rows

    def kept_table(self) -> "pa.Table":
        """Return the kept columns as a table, with the types that they have in a parquet input.

        Raises:
            InputError: a column's values have no common type.
        """
        import pyarrow as pa

        first = self.rows[0].kept
        if not isinstance(first, dict):
            return pa.Table.from_batches([row.kept for row in self.rows]).combine_chunks()
        arrays = {name: self._array(name) for name in first}
        return pa.table(arrays)

    def _array(self, name: str) -> "pa.Array":
        import pyarrow as pa

        try:
            return pa.array([row.kept[name] for row in self.rows])
        except (pa.ArrowException, OverflowError) as error:
            raise InputError(f"--keep: column {name!r} is of no single type: {error}") from error

    def digest(self) -> str:
        """Hash the texts and the kept columns, to tell whether an input is still the same."""
        digest = hashlib.sha256()
        for row in self.rows:
            raw = row.text.encode()
            digest.update(b"%d:" % len(raw))
            digest.update(raw)
        digest.update(self._kept_bytes())
        return digest.hexdigest()[:32]

    def _kept_bytes(self) -> bytes:
        if isinstance(self.rows[0].kept, dict):
            return repr([row.kept for row in self.rows]).encode()
        from pyarrow import parquet

        buffer = io.BytesIO()
        parquet.write_table(self.kept_table(), buffer)
        return buffer.getvalue()


def cut_chunks(rows: Iterable[Row], max_rows: int, max_chars: int) -> Iterator[Chunk]:
    """Group rows, up to `max_rows` and `max_chars` characters of text; a chunk has at least one.

    Where chunks begin depends on the texts alone, so a second pass over the same input finds the
    same ones.
    """
    group: list[Row] = []
    first = chars = 0
    for row in rows:
        if group and (len(group) == max_rows or chars + len(row.text) > max_chars):
            yield Chunk(first, group)
            first += len(group)
            group, chars = [], 0
        group.append(row)
        chars += len(row.text)
    if group:
        yield Chunk(first, group)
