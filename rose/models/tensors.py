"""The tensors of a checkpoint: which there are, in which file, and how to get one.

safetensors files are memory-mapped; PyTorch files are loaded with `weights_only=True` and mapped
too, where their format allows it.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError
from rose.models.weight_files import WeightFiles, find_weight_files, read_header

Getter = Callable[[], Tensor]

# Those that weights and stored codes can have; whatever else is refused alike.
_HEADER_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class CheckpointTensors:
    """Every tensor of a checkpoint by its name in the files."""

    def __init__(self, files: WeightFiles) -> None:
        """Open the files; nothing but headers is read of safetensors files.

        Raises:
            CheckpointError: a file is missing, damaged or refused.
        """
        self.paths = files.paths
        self._safetensors = files.safetensors
        self._getters: dict[str, Getter] = {}
        self._files: dict[str, Path] = {}
        for path in files.paths:
            for name, getter in self._open(path):
                self._add(name, path, getter)
        for name, path in files.index.items():
            if self._files.get(name) != path:
                raise CheckpointError(
                    f"tensor {name!r} is not in {path}, where the index says it is"
                )

    def _open(self, path: Path) -> Iterator[tuple[str, Getter]]:
        return _open_safetensors(path) if self._safetensors else _open_torch(path)

    def _add(self, name: str, path: Path, getter: Getter) -> None:
        if name in self._files:
            raise CheckpointError(f"tensor {name!r} is in both {self._files[name]} and {path}")
        self._getters[name] = getter
        self._files[name] = path

    def combine(self, name: str, parts: tuple[str, ...], make: Callable[..., Tensor]) -> None:
        """Let a tensor `name` stand for others, of which `make` makes it.

        Raises:
            CheckpointError: a part is missing.
        """
        getters = []
        for part in parts:
            if part not in self._getters:
                raise CheckpointError(f"tensor {part!r} is missing from {self._files[parts[0]]}")
            getters.append(self._getters.pop(part))
        path = self._files[parts[0]]
        self._add(name, path, lambda: make(*(getter() for getter in getters)))

    def __contains__(self, name: str) -> bool:
        return name in self._getters

    def __iter__(self) -> Iterator[str]:
        return iter(self._getters)

    def file(self, name: str) -> Path:
        """Name the file that holds a tensor."""
        return self._files[name]

    def get(self, name: str) -> Tensor:
        """Return a tensor on the CPU, mapped from its file.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            return self._getters[name]()
        except (SafetensorError, OSError, RuntimeError) as error:
            path = self._files[name]
            raise CheckpointError(f"tensor {name!r} of {path} cannot be read: {error}") from error


class HeaderTensors(CheckpointTensors):
    """The same of safetensors files, on the meta device: shapes and dtypes without numbers."""

    def _open(self, path: Path) -> Iterator[tuple[str, Getter]]:
        for header in read_header(path):
            dtype = _HEADER_DTYPES.get(header.dtype, torch.bool)
            yield header.name, partial(torch.empty, header.shape, dtype=dtype, device="meta")


def open_tensors(folder: CheckpointFolder) -> CheckpointTensors:
    """Open the weights of a folder.

    Raises:
        CheckpointError: there are none, or a file is missing, damaged or refused.
    """
    return CheckpointTensors(find_weight_files(folder))


def _open_safetensors(path: Path) -> Iterator[tuple[str, Getter]]:
    try:
        handle = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a complete safetensors file: {error}") from error
    for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
        yield name, partial(handle.get_tensor, name)


def _open_torch(path: Path) -> Iterator[tuple[str, Getter]]:
    values = _load_torch(path)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: a dict of tensors is expected, found {type(values)}")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: entry {name!r} is no tensor but {type(value)}")
        if value.layout != torch.strided or value.is_quantized:
            kind = "quantized" if value.is_quantized else str(value.layout)
            raise CheckpointError(
                f"tensor {name!r} of {path} is {kind}, only plain tensors are supported"
            )
        yield name, value.detach


def _load_torch(path: Path) -> object:
    try:
        # Only zip files can be mapped; those of PyTorch before 1.6 are read into memory.
        mapped = _is_zip(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that are refused right after
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().split("\n")[0]  # the rest advises to load it all the same
        raise CheckpointError(
            f"{path}: refused, it is damaged, or holds more than tensors and could run code when "
            f"loaded: {reason}"
        ) from error
    # What a damaged pickle asks for fails in any way.
    except Exception as error:
        raise CheckpointError(f"{path}: not a complete PyTorch file: {error!r}") from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
