"""A GGUF file: its metadata as plain Python values, its tensors dequantised one at a time."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rose.models.errors import ConvertError

if TYPE_CHECKING:
    from gguf import GGUFReader

T = TypeVar("T")

_BLOCK_ELEMENTS = 1 << 22
_INSTALL = "reading GGUF files needs the package gguf: pip install 'rose-engine[gguf]'"


class GgufFile:
    """Metadata and tensors of one GGUF file.

    Attributes:
        path: the file.
        architecture: value of `general.architecture`, the prefix of the model's own keys.
        tensors: `gguf.gguf_reader.ReaderTensor` by name; their data stays on disk until read.

    Raises:
        ConvertError: not a GGUF file, cut short, or one part of several.
        ImportError: the package gguf is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _open(path)
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self._fields: dict[str, Any] = reader.fields
        self.architecture: str = self.require("general.architecture", str)
        if (parts := self.get("split.count", int, 0)) > 1:
            raise self.error(f"is one of {parts} parts; join them with llama-gguf-split --merge")

    def error(self, message: str) -> ConvertError:
        """The error to raise, with the file's name in front of the message."""
        return ConvertError(f"{self.path}: {message}")

    def settings(self) -> dict[str, object]:
        """The architecture's own metadata, without the prefix: `{"rope.freq_base": 1e6, ...}`."""
        prefix = self.own("")
        return {
            key.removeprefix(prefix): self._contents(key)
            for key in self._fields
            if key.startswith(prefix)
        }

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value of `key`, or `default` where the file has none."""
        return self.require(key, kind) if key in self._fields else default

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`, which must be there and of the given type; numbers are finite."""
        if key not in self._fields:
            raise self.error(f"has no metadata {key!r}")
        value = self._contents(key)
        if kind is float and type(value) is int:
            value = float(value)
        is_flag = isinstance(value, bool) and kind in (int, float)  # true is 1 in Python alone
        is_odd = is_flag or (isinstance(value, float) and not np.isfinite(value))
        if is_odd or not isinstance(value, kind):
            raise self.error(f"metadata {key!r} should be {kind.__name__}, but is {value!r:.80}")
        return value

    def _contents(self, key: str) -> Any:  # noqa: ANN401 - whatever the file has
        try:
            return self._fields[key].contents()
        except UnicodeDecodeError as e:
            raise self.error(f"metadata {key!r} is damaged: {e}") from e

    def at_least(self, least: int, key: str, default: int | None = None) -> int:
        """The value of `key`, or `default` if there is one: a whole number from `least` on."""
        value = self.require(key, int) if default is None else self.get(key, int, default)
        if value < least:
            raise self.error(f"metadata {key!r} is {value}, and {least} is the least possible")
        return value

    def own(self, name: str) -> str:
        """The full key of a setting of this architecture: `own("rope.freq_base")`."""
        return f"{self.architecture}.{name}"

    def read(self, name: str, index: int | None = None) -> NDArray[np.float32]:
        """The values of a tensor, dequantised, in the row-major shape that torch would give it.

        `index` asks for that part of the first dimension alone.

        Raises:
            ConvertError: the quantisation is not one that can be read, or a value is not finite.
        """
        if index is not None:
            return self._dequantize(name, slice(index, index + 1))[0].copy()
        values = np.empty(self.shape(name), np.float32)
        for rows in self._blocks(name):
            values[rows] = self._dequantize(name, rows)
        return values

    def _blocks(self, name: str) -> list[slice]:
        """Cut a tensor by its rows, because dequantising needs several times their size."""
        length = self.shape(name)[0]
        step = max(1, _BLOCK_ELEMENTS * length // max(int(self.tensors[name].n_elements), 1))
        return [slice(start, start + step) for start in range(0, length, step)]

    def _dequantize(self, name: str, rows: slice) -> NDArray[np.float32]:
        from gguf import dequantize

        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data[rows], tensor.tensor_type)
        except NotImplementedError as e:
            kind = tensor.tensor_type.name
            raise self.error(
                f"tensor {name!r} has quantisation {kind}, which cannot be read"
            ) from e
        if not np.isfinite(values).all():
            raise self.error(f"tensor {name!r} holds values that are not finite")
        return np.asarray(values, np.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, outermost dimension first (GGUF itself counts from the inner)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))


def _open(path: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader
    except ImportError as e:
        raise ImportError(_INSTALL) from e
    if not path.is_file():
        raise ConvertError(f"{path}: there is no such file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConvertError(f"{path}: is not a GGUF file (it does not begin with 'GGUF')")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as e:
        # The reader has no error of its own: a short file surfaces as an index or a reshape.
        raise ConvertError(f"{path}: is cut short, damaged or of an unknown kind ({e})") from e


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
