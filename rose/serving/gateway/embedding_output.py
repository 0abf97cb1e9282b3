"""From vectors to the body of an embedding answer."""

import binascii
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from rose.serving.gateway.errors import ApiError

# One call to the encoder holds the GIL; it gets no more numbers than this.
NUMBERS_PER_CALL = 1 << 16

Vectors = npt.NDArray[np.generic]


def check_finite(vectors: Vectors, counts: Sequence[int] | None = None) -> None:
    """Refuses NaN and infinity, for which JSON has no form; `counts` are the rows of each text.

    Raises:
        ApiError: 500, naming the text.
    """
    if vectors.dtype.kind != "f":
        return
    finite = np.isfinite(vectors)
    if not finite.all():
        row = int(np.argmin(finite.all(axis=1)))
        index = row if counts is None else int(np.searchsorted(np.cumsum(counts), row, "right"))
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
    return b'{"object":"list","data":[' + _joined_rows(vectors, as_base64) + b"]," + tail[1:]


def encode_documents(
    vectors: Vectors, counts: Sequence[int], as_base64: bool, model: str, usage: dict[str, int]
) -> bytes:
    """The JSON body of vectors of chunks; see `encode_answer`.

    Args:
        vectors: [chunks of all documents, width].
        counts: Chunks of each document.
        as_base64: Whether a vector is the base64 of its bytes.
        model: Name to report.
        usage: Token counts to report.
    """
    ends = list(accumulate(counts))
    documents = (
        b'{"object":"list","index":%d,"data":[' % i
        + _joined_rows(vectors[end - count : end], as_base64)
        + b"]}"
        for i, (end, count) in enumerate(zip(ends, counts, strict=True))
    )
    tail = orjson.dumps({"model": model, "usage": usage})
    return b'{"object":"list","data":[' + b",".join(documents) + b"]," + tail[1:]


def _joined_rows(vectors: Vectors, as_base64: bool) -> bytes:
    return b",".join(_rows(np.ascontiguousarray(vectors), as_base64))


def _rows(vectors: Vectors, as_base64: bool) -> Iterator[bytes]:
    step = max(1, NUMBERS_PER_CALL // max(1, vectors.shape[1]))
    for start in range(0, len(vectors), step):
        items: list[dict[str, Any]] = [
            {
                "object": "embedding",
                "index": start + i,
                "embedding": as_text(row) if as_base64 else row,
            }
            for i, row in enumerate(vectors[start : start + step])
        ]
        yield orjson.dumps(items, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def as_text(row: Vectors) -> str:
    """The base64 of a vector's little-endian bytes."""
    little = row.astype(row.dtype.newbyteorder("<"), copy=False)
    return binascii.b2a_base64(little.data, newline=False).decode("ascii")
