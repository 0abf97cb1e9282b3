"""The last steps from the model's output to an answer, on the host.

Vectors: cut, normalise, quantise, in this order and in float32. Scores: an activation, in float64,
so that great scores keep their order. Shape letters: B sequences, D channels of the vector, L
labels.
"""

import math
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
    vectors_BD: "ArrayLike",
    options: OutputOptions,
    normalize_default: bool,
    quantizer: str = "scale",
) -> "NDArray[Any]":
    """Cut, normalise and quantise finite vectors.

    Args:
        vectors_BD: float32 [B, D], an array or a tensor on the CPU. It is not changed.
        options: the request's wishes.
        normalize_default: what the checkpoint says where the request says nothing.
        quantizer: how the checkpoint makes whole numbers. "scale": by the largest magnitude of each
            vector, where they are asked for. "tanh": always, as round(127 tanh(x)); a vector of
            floats holds these codes, and bits are the signs of what they were made of.

    Returns:
        A C-contiguous array [B, d] of the type that `output_dtype` stands for; d is the width that
        was asked for, an eighth of it (rounded up) for binary types.

    Raises:
        ValueError: `dimensions` or `output_dtype` cannot be, or `normalize` does not go with them.
    """
    array = np.asarray(vectors_BD, dtype=np.float32)
    normalize = check_output(options, array.shape[-1], normalize_default, quantizer)
    cut = array[:, : options.dimensions]
    if quantizer == "tanh":
        return np.ascontiguousarray(_tanh_codes(cut, options.output_dtype, normalize=normalize))
    quantize = QUANTIZERS[options.output_dtype]
    return np.ascontiguousarray(quantize(l2_normalize(cut) if normalize else cut))


def check_output(
    options: OutputOptions, width: int, normalize_default: bool, quantizer: str = "scale"
) -> bool:
    """Check what a request wants of vectors of `width` numbers; other arguments are as in `finish`.

    Returns:
        Whether vectors are normalised.

    Raises:
        ValueError: as `finish` raises it; the message begins with the field's name.
    """
    if options.dimensions is not None and not 1 <= options.dimensions <= width:
        raise ValueError(f"dimensions: must be from 1 to {width}, not {options.dimensions}")
    if options.output_dtype not in QUANTIZERS:
        known = ", ".join(QUANTIZERS)
        raise ValueError(f"output_dtype: {options.output_dtype!r} is not among {known}")
    normalize = normalize_default if options.normalize is None else options.normalize
    if quantizer == "tanh" and normalize and not options.output_dtype.startswith("float"):
        message = f"normalize: {options.output_dtype} codes of this model are not normalised"
        raise ValueError(message)
    return normalize


def _tanh_codes(
    array: "NDArray[np.float32]", output_dtype: str, *, normalize: bool
) -> "NDArray[Any]":
    """Quantise as pplx-embed's FlexibleQuantizer does."""
    if output_dtype in ("binary", "ubinary"):
        bits = np.packbits(array >= 0, axis=-1)
        return bits if output_dtype == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    codes = np.rint(np.tanh(array) * np.float32(127))
    if output_dtype == "int8":
        return codes.astype(np.int8)
    if output_dtype == "uint8":
        return (codes + 128).astype(np.uint8)
    return QUANTIZERS[output_dtype](l2_normalize(codes) if normalize else codes)


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


def activate_scores(raw_BL: "ArrayLike", activation: str) -> "NDArray[np.float64]":
    """Apply the activation of a card to raw scores.

    Args:
        raw_BL: what the model computed, float32 [B, L]. It is not changed.
        activation: one of `ACTIVATIONS`.

    Returns:
        [B, L]. Raw scores that differ give different results up to about 36 for "sigmoid".
    """
    return ACTIVATIONS[activation](np.asarray(raw_BL, dtype=np.float64))


def probabilities(raw_BL: "ArrayLike", how: str) -> "NDArray[np.float64]":
    """Turn raw scores into probabilities: "sigmoid" of each label, "softmax" over all."""
    raw = np.asarray(raw_BL, dtype=np.float64)
    if how == "sigmoid":
        return _sigmoid(raw)
    exponential = np.exp(raw - raw.max(axis=-1, keepdims=True))
    return exponential / exponential.sum(axis=-1, keepdims=True)


def _sigmoid(x: "NDArray[np.float64]") -> "NDArray[np.float64]":
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1, small) / (1 + small)


def _gelu(x: "NDArray[np.float64]") -> "NDArray[np.float64]":
    return x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2


def _elu(x: "NDArray[np.float64]") -> "NDArray[np.float64]":
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _selu(x: "NDArray[np.float64]") -> "NDArray[np.float64]":
    alpha, scale = 1.6732632423543772, 1.0507009873554805  # Klambauer et al., 2017
    return scale * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _softplus(x: "NDArray[np.float64]") -> "NDArray[np.float64]":
    return np.logaddexp(0, x)


def _hardsigmoid(x: "NDArray[np.float64]") -> "NDArray[np.float64]":
    return np.clip(x / 6 + 0.5, 0, 1)


# As torch has them, with its defaults.
ACTIVATIONS: "dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]]" = {
    "celu": _elu,
    "elu": _elu,
    "gelu": _gelu,
    "hardshrink": lambda x: np.where(np.abs(x) > 0.5, x, 0),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x: x * _hardsigmoid(x),
    "hardtanh": lambda x: np.clip(x, -1, 1),
    "identity": lambda x: x,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "logsigmoid": lambda x: -_softplus(-x),
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "rrelu": lambda x: np.where(x > 0, x, x * (1 / 8 + 1 / 3) / 2),
    "selu": _selu,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "softplus": _softplus,
    "softshrink": lambda x: x - np.clip(x, -0.5, 0.5),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "tanh": np.tanh,
    "tanhshrink": lambda x: x - np.tanh(x),
}
