"""The work in progress for an output file: a folder beside it, safe against an end at any moment.

OUTPUT.partial/ holds

- `manifest.json`: the model and the options that the chunks depend on;
- `NNNNNNNN.chunk`: a chunk's results, written under another name and then renamed;
- `chunks.jsonl`: one line for each chunk that is complete, in order. A chunk without its line is
  computed again; a line that was cut short by a crash is no line;
- `lock`: held by the process at work.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rose.serving.offline.errors import OutputError

MANIFEST, JOURNAL, LOCK = "manifest.json", "chunks.jsonl", "lock"

Facts = Mapping[str, Any]


class DoneChunk(msgspec.Struct, frozen=True):
    """A chunk that is saved: its rows, its tokens, how many texts were cut, its input's digest."""

    rows: int
    tokens: int
    cut: int = 0
    digest: str = ""


class Partial:
    """The folder of one output. Use `open_partial`."""

    def __init__(self, output: Path) -> None:
        """Name the folder of `output`; nothing is touched yet."""
        self.output = output
        self.folder = output.with_name(f"{output.name}.partial")
        self.chunks: list[DoneChunk] = []

    @property
    def rows(self) -> int:
        """Number of texts that are done."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def paths(self) -> list[Path]:
        """Files of the chunks that are done."""
        return [self._chunk_path(number) for number in range(len(self.chunks))]

    def resume(self, facts: Facts) -> None:
        """Find what an earlier run has left; `facts` are those that it has to agree with.

        Raises:
            OutputError: it was begun with other facts; the message says which.
        """
        self.reload()
        if not self.chunks:  # nothing depends on what an earlier run was given
            self._replace(self._path(MANIFEST), lambda file: file.write(msgspec.json.encode(facts)))
        then = msgspec.json.decode(self._path(MANIFEST).read_bytes(), type=dict[str, Any])
        now = msgspec.json.decode(msgspec.json.encode(facts), type=dict[str, Any])
        if differ := [key for key in {**then, **now} if then.get(key) != now.get(key)]:
            changes = "; ".join(_describe(key, then.get(key), now.get(key)) for key in differ)
            raise OutputError(
                f"{self.folder} was begun with something else: {changes}. "
                "Give the same again to go on, or --restart to begin afresh."
            )

    def reload(self) -> None:
        """Find the chunks that are complete."""
        self.chunks = self._read_journal()

    def add(self, chunk: DoneChunk, write: Callable[[BinaryIO], object]) -> None:
        """Save the next chunk."""
        self._replace(self._chunk_path(len(self.chunks)), write)
        with _explained(self.folder), self._path(JOURNAL).open("ab") as journal:
            journal.write(msgspec.json.encode(chunk) + b"\n")
            _sync(journal)
        self.chunks.append(chunk)

    def finish(self, join: Callable[[Sequence[Path], BinaryIO], None]) -> None:
        """Put the output together, move it into its place, and remove the folder."""
        self._replace(self.output, lambda file: join(self.paths, file))
        shutil.rmtree(self.folder)

    def clear(self) -> None:
        """Remove all that earlier runs have left."""
        for path in self.folder.iterdir():
            if path.name != LOCK:
                path.unlink()

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _chunk_path(self, number: int) -> Path:
        return self._path(f"{number:08d}.chunk")

    def _replace(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Write a file so that it is there completely or not at all."""
        scratch = self._path("scratch")
        with _explained(path):
            with scratch.open("wb") as file:
                write(file)
                _sync(file)
            scratch.replace(path)

    def _read_journal(self) -> list[DoneChunk]:
        """Read the chunks that are complete, and drop what a crash has left after them."""
        path = self._path(JOURNAL)
        chunks: list[DoneChunk] = []
        size = 0
        if not path.exists():
            return chunks
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or not self._chunk_path(len(chunks)).exists():
                break
            chunks.append(msgspec.json.decode(line, type=DoneChunk))
            size += len(line)
        os.truncate(path, size)
        return chunks


@contextlib.contextmanager
def open_partial(output: Path) -> Iterator[Partial]:
    """Make or find the folder for an output, and keep other processes out of it.

    Raises:
        OutputError: the folder cannot be made, or another process is at work in it.
    """
    partial = Partial(output)
    with _explained(partial.folder):
        partial.folder.mkdir(exist_ok=True)
        lock = (partial.folder / LOCK).open("wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"another process is writing {output} at this moment") from None
        try:
            yield partial
        finally:
            if not partial.chunks:
                shutil.rmtree(partial.folder, ignore_errors=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that names what was to be written."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _describe(key: str, then: object, now: object) -> str:
    if not key.startswith("--"):
        return f"{key} has other content"
    return f"{key} was {_show(then)} and is {_show(now)}"


def _show(value: object) -> str:
    return "not given" if value is None or value is False or value == [] else repr(value)
