"""From vectors to the body of an embedding answer."""

import binascii
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from rose.serving.gateway.errors import ApiError

# One call to the encoder holds the GIL; it gets no more numbers than this.
NUMBERS_PER_CALL = 1 << 16

Vectors = npt.NDArray[np.generic]


def check_finite(vectors: Vectors) -> None:
    """Refuses NaN and infinity, for which JSON has no form.

    Raises:
        ApiError: 500, naming the text.
    """
    if vectors.dtype.kind != "f":
        return
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        index = int(np.argmin(finite))
        message = f"The model's vector for 'input[{index}]' is not finite."
        raise ApiError(500, message, param=f"input[{index}]", code="non_finite")


def encode_answer(vectors: Vectors, as_base64: bool, model: str, usage: dict[str, int]) -> bytes:
    """The JSON body; vectors go from memory to text without Python numbers in between.

    Args:
        vectors: [texts, width], of the output dtype.
        as_base64: Whether a vector is the base64 of its bytes.
        model: Name to report.
        usage: Token counts to report.
    """
    tail = orjson.dumps({"model": model, "usage": usage})
    rows = b",".join(_rows(np.ascontiguousarray(vectors), as_base64))
    return b'{"object":"list","data":[' + rows + b"]," + tail[1:]


def _rows(vectors: Vectors, as_base64: bool) -> Iterator[bytes]:
    step = max(1, NUMBERS_PER_CALL // max(1, vectors.shape[1]))
    for start in range(0, len(vectors), step):
        items: list[dict[str, Any]] = [
            {
                "object": "embedding",
                "index": start + i,
                "embedding": _base64(row) if as_base64 else row,
            }
            for i, row in enumerate(vectors[start : start + step])
        ]
        yield orjson.dumps(items, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _base64(row: Vectors) -> str:
    little = row.astype(row.dtype.newbyteorder("<"), copy=False)
    return binascii.b2a_base64(little.data, newline=False).decode("ascii")
