"""Finds a checkpoint's weight files and reads their headers. Free of torch."""

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError

# In order of preference. An index names the shards.
_CANDIDATES = (
    ("model.safetensors", True, False),
    ("model.safetensors.index.json", True, True),
    ("pytorch_model.bin", False, False),
    ("pytorch_model.bin.index.json", False, True),
)
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}  # bytes of an element
_MAX_HEADER = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files to load. `index` maps a tensor's name to the file in which it has to be."""

    paths: tuple[Path, ...]
    safetensors: bool
    index: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a safetensors header says of a tensor; `dtype` as there, such as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def find_weight_files(folder: CheckpointFolder) -> WeightFiles:
    """Choose the weight files of a folder: safetensors before PyTorch, one file before shards.

    Raises:
        CheckpointError: there are none, or a shard is missing.
    """
    for name, safetensors, sharded in _CANDIDATES:
        if not folder.exists(name):
            continue
        if not sharded:
            return WeightFiles((folder.path / name,), safetensors)
        index = _read_index(folder, name)
        return WeightFiles(tuple(sorted(set(index.values()))), safetensors, index)
    names = ", ".join(name for name, _, _ in _CANDIDATES)
    raise CheckpointError(
        f"{folder.path} has no weights. Looked for {names}; the folder has {folder.listing()}."
    )


def _read_index(folder: CheckpointFolder, name: str) -> dict[str, Path]:
    weight_map = (folder.json(name) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder.path / name}: weight_map: an object is expected")
    return {tensor: _shard(folder, name, tensor, file) for tensor, file in weight_map.items()}


def _shard(folder: CheckpointFolder, index: str, tensor: str, file: object) -> Path:
    where = f"{folder.path / index}: weight_map: {tensor}"
    if not isinstance(file, str) or PurePosixPath(file).name != file:
        raise CheckpointError(f"{where}: the name of a file in the folder is expected: {file!r}")
    if not folder.exists(file):
        raise CheckpointError(f"{where}: the file {file} is missing")
    return folder.path / file


def tensor_names(files: WeightFiles) -> list[str] | None:
    """List the tensors, from headers or an index; None where only loading would tell."""
    if files.safetensors:
        return [header.name for header in read_headers(files)]
    return list(files.index) or None


def read_headers(files: WeightFiles) -> list[TensorHeader]:
    """Read the headers of safetensors files; an empty list for PyTorch files, which have none.

    Raises:
        CheckpointError: a file is damaged.
    """
    if not files.safetensors:
        return []
    return [header for path in files.paths for header in read_header(path)]


def read_header(path: Path) -> list[TensorHeader]:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: the file is damaged.
    """
    entries, start = _header_entries(path)
    entries.pop("__metadata__", None)
    try:
        offsets = (map(int, entry["data_offsets"]) for entry in entries.values())
        spans = [(first, last) for first, last in offsets]
        headers = [
            TensorHeader(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), path)
            for name, entry in entries.items()
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {error!r}") from error
    _check_spans(path, headers, spans, start)
    return headers


def _check_spans(
    path: Path, headers: list[TensorHeader], spans: list[tuple[int, int]], start: int
) -> None:
    """Refuse data that is cut off, is not as long as a shape, or is of two tensors."""
    for header, (first, last) in zip(headers, spans, strict=True):
        width = _WIDTHS.get(header.dtype)
        if width and last - first != header.elements * width:
            raise CheckpointError(
                f"tensor {header.name!r} of {path} has {last - first} bytes, its shape "
                f"{list(header.shape)} asks for {header.elements * width}"
            )
    end, size = 0, path.stat().st_size
    for first, last in sorted(spans):  # the format has no gaps
        if first != end:
            raise CheckpointError(
                f"{path}: the safetensors header is damaged: tensors overlap or leave gaps"
            )
        end = last
    if size < start + end:
        raise CheckpointError(f"{path}: the file is cut off: it has {size} of {start + end} bytes")


def _header_entries(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header, and where the data begins."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length)) if length <= _MAX_HEADER else None
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: not a safetensors file: it has no header")
    return entries, 8 + length
