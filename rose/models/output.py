"""The last steps from a vector to an answer, in one fixed order: cut, normalise, quantise.

All in float32 on the host. Shape letters: B sequences, D channels of the vector.
"""

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

_FLOAT16_MAX = float(np.finfo(np.float16).max)


class OutputOptions(Protocol):
    """What a request says about its vectors; see `rose.runtime.options.EmbedOptions`."""

    @property
    def dimensions(self) -> int | None:
        """Width to cut to; None keeps all."""
        ...

    @property
    def normalize(self) -> bool | None:
        """Whether to normalise; None is what the checkpoint says."""
        ...

    @property
    def output_dtype(self) -> str:
        """A key of `QUANTIZERS`."""
        ...


def finish(
    vectors_BD: "ArrayLike", options: OutputOptions, normalize_default: bool
) -> "NDArray[Any]":
    """Cut, normalise and quantise finite vectors.

    Args:
        vectors_BD: float32 [B, D], an array or a tensor on the CPU. It is not changed.
        options: the request's wishes.
        normalize_default: what the checkpoint says where the request says nothing.

    Returns:
        A C-contiguous array [B, d] of the type that `output_dtype` stands for; d is the width that
        was asked for, an eighth of it (rounded up) for binary types.

    Raises:
        ValueError: `dimensions` or `output_dtype` cannot be.
    """
    array = np.asarray(vectors_BD, dtype=np.float32)
    cut = _cut(array, options.dimensions)
    normalize = normalize_default if options.normalize is None else options.normalize
    if options.output_dtype not in QUANTIZERS:
        known = ", ".join(QUANTIZERS)
        raise ValueError(f"output_dtype: {options.output_dtype!r} is not among {known}")
    quantize = QUANTIZERS[options.output_dtype]
    return np.ascontiguousarray(quantize(l2_normalize(cut) if normalize else cut))


def _cut(array: "NDArray[np.float32]", dimensions: int | None) -> "NDArray[np.float32]":
    width = array.shape[-1]
    if dimensions is None:
        return array
    if not 1 <= dimensions <= width:
        raise ValueError(f"dimensions: from 1 to {width} is possible, found {dimensions}")
    return array[:, :dimensions]


def l2_normalize(array: "NDArray[np.float32]") -> "NDArray[np.float32]":
    """Scale every row to length 1; rows of zeros stay zeros.

    Rows are divided by their largest magnitude first, so that squares neither overflow nor vanish.
    """
    scaled = array / _nonzero(np.abs(array).max(axis=-1, keepdims=True, initial=0.0))
    length = np.sqrt(np.einsum("bd,bd->b", scaled, scaled, dtype=np.float32))[:, None]
    return scaled / _nonzero(length)


def _nonzero(scale: "NDArray[np.float32]") -> "NDArray[np.float32]":
    return np.where(scale == 0, np.float32(1), scale)


def _float16(array: "NDArray[np.float32]") -> "NDArray[Any]":
    # What is too large for float16 becomes its largest number: an infinity is no answer.
    return array.clip(-_FLOAT16_MAX, _FLOAT16_MAX).astype(np.float16)


def _int8(array: "NDArray[np.float32]") -> "NDArray[np.int8]":
    """Round 127 x / max|x| of each row: the direction stays, the length does not."""
    largest = _nonzero(np.abs(array).max(axis=-1, keepdims=True, initial=0.0))
    return np.rint(array / largest * np.float32(127)).astype(np.int8)


def _uint8(array: "NDArray[np.float32]") -> "NDArray[np.uint8]":
    """The int8 code plus 128: 1 to 255, zero is 128."""
    return (_int8(array).astype(np.int16) + 128).astype(np.uint8)


def _ubinary(array: "NDArray[np.float32]") -> "NDArray[np.uint8]":
    """One bit per channel, set where it is positive; the first channel is the highest bit."""
    return np.packbits(array > 0, axis=-1)


def _binary(array: "NDArray[np.float32]") -> "NDArray[np.int8]":
    """The bytes of `_ubinary` minus 128, as sentence-transformers packs them."""
    return (_ubinary(array).astype(np.int16) - 128).astype(np.int8)


QUANTIZERS: "dict[str, Callable[[NDArray[np.float32]], NDArray[Any]]]" = {
    "float32": lambda array: array,
    "float16": _float16,
    "int8": _int8,
    "uint8": _uint8,
    "binary": _binary,
    "ubinary": _ubinary,
}
