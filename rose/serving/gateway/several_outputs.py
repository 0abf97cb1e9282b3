"""Several kinds of vectors in one answer: which a request asks for, and the body they make."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rose.models.card import EmbeddingCard, EmbeddingOutput, RowOutput
from rose.serving.gateway.embedding_output import NUMBERS_PER_CALL, Vectors, as_text
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.sparse_output import SparseRow, encode_weights

FIELD = "output_types"


@dataclass(frozen=True)
class Kinds:
    """The vectors of a request's texts; what was not asked for is None.

    Attributes:
        dense: [texts, width], of the output dtype.
        sparse: Tokens and their weights, of each text.
        tokens: float32 [vectors, width] of each text.
    """

    dense: Vectors | None = None
    sparse: Sequence[SparseRow] | None = None
    tokens: Sequence[Vectors] | None = None


def checked_types(
    body: EmbeddingRequest, card: EmbeddingCard, model: str
) -> tuple[EmbeddingOutput, ...]:
    """The kinds that a request asks for, each once.

    Raises:
        ApiError: 400, there are none, the model has none such, or other fields do not go with them.
    """
    wanted = dict.fromkeys(body.output_types or ())
    has = ", ".join(f"'{kind}'" for kind in card.outputs)
    if not wanted:
        raise bad_request(f"'{FIELD}' is empty; '{model}' has {has}.", FIELD)
    found = tuple(kind for kind in card.outputs if kind in wanted)
    if len(found) < len(wanted):
        missing = next(kind for kind in wanted if kind not in card.outputs)
        raise bad_request(f"'{FIELD}' has '{missing[:40]}'; '{model}' has {has}.", FIELD)
    if "dense" not in found:
        _refuse_dense_fields(body)
    return found


def _refuse_dense_fields(body: EmbeddingRequest) -> None:
    unfit = {
        "dimensions": body.dimensions is not None,
        "normalize": body.normalize is not None,
        "output_dtype": body.output_dtype not in (None, "float32"),
        "encoding_format": body.encoding_format in ("base64_int8", "base64_binary"),
    }
    for name, is_unfit in unfit.items():
        if is_unfit:
            raise bad_request(f"'{name}' is for dense vectors, which are not asked for.", name)


def engine_outputs(types: Sequence[EmbeddingOutput], card: EmbeddingCard) -> tuple[RowOutput, ...]:
    """What the engine computes for some kinds. A model that is only sparse has rows of texts."""
    rows: dict[EmbeddingOutput, RowOutput] = {
        "dense": "text",
        "sparse": "token_weights" if "dense" in card.outputs else "text",
        "multi_vector": "multi_vector",
    }
    return tuple(rows[kind] for kind in types)


def encode_kinds(
    kinds: Kinds, texts: int, as_base64: bool, model: str, usage: dict[str, int]
) -> bytes:
    """The JSON body; see `rose.serving.gateway.embedding_output.encode_answer`."""
    entries = (b"".join(_entry(kinds, i, as_base64)) for i in range(texts))
    tail = orjson.dumps({"model": model, "usage": usage})
    return b'{"object":"list","data":[' + b",".join(entries) + b"]," + tail[1:]


def _entry(kinds: Kinds, index: int, as_base64: bool) -> Iterator[bytes]:
    yield b'{"object":"embedding","index":%d' % index
    if kinds.dense is not None:
        row = np.ascontiguousarray(kinds.dense[index])
        yield b',"embedding":' + _dump(as_text(row) if as_base64 else row)
    if kinds.sparse is not None:
        yield b',"sparse_embedding":' + encode_weights(kinds.sparse[index])
    if kinds.tokens is not None:
        yield b',"multi_vector_embedding":' + encode_rows(kinds.tokens[index], as_base64)
    yield b"}"


def encode_rows(rows: Vectors, as_base64: bool = False) -> bytes:
    """A list of vectors; a call to the encoder, which holds the GIL, gets few."""
    rows = np.ascontiguousarray(rows)
    if as_base64:
        return orjson.dumps([as_text(row) for row in rows])
    step = max(1, NUMBERS_PER_CALL // max(1, rows.shape[1]))
    parts = (_dump(rows[at : at + step])[1:-1] for at in range(0, len(rows), step))
    return b"[" + b",".join(parts) + b"]"


def _dump(value: Any) -> bytes:  # noqa: ANN401 - numpy arrays of any dtype, or text
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
