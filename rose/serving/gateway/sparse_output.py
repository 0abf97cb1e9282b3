"""From weights to the sparse vectors of an answer: which tokens, and how much each weighs."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import orjson

from rose.serving.gateway.tokenization import Ids, Tokenizer

Weights = npt.NDArray[np.float32]
SparseRow = tuple[npt.NDArray[np.int64], Weights]

# What stands around every text says nothing about it.
UNUSED = ("cls_token", "eos_token", "sep_token", "pad_token", "unk_token")


def of_vocabulary(vectors: Weights) -> Iterator[SparseRow]:
    """The tokens with a weight, of vectors [texts, vocabulary] (SPLADE)."""
    for row in vectors:
        found = np.flatnonzero(row)
        yield found, row[found]


def of_tokens(
    ids: Sequence[Ids], weights: Weights, unused: npt.NDArray[np.int64]
) -> Iterator[SparseRow]:
    """The tokens of each text with their weights, the largest where one occurs twice (BGE-M3).

    Args:
        ids: int32 [tokens] of each text.
        weights: [tokens of all texts, 1].
        unused: Tokens to leave out.
    """
    ends = np.cumsum([len(row) for row in ids])[:-1]
    for row, own in zip(ids, np.split(weights[:, 0], ends), strict=True):
        found, places = np.unique(row, return_inverse=True)
        best = np.zeros(len(found), weights.dtype)
        np.maximum.at(best, places, own)
        kept = (best > 0) & ~np.isin(found, unused)
        yield found[kept].astype(np.int64), best[kept]


def unused_ids(tokenizer: Tokenizer, special_tokens: dict[str, str]) -> npt.NDArray[np.int64]:
    """The ids of `UNUSED`, as far as a tokenizer has them."""
    texts = [text for name, text in special_tokens.items() if name in UNUSED]
    found = [tokenizer.backend.token_to_id(text) for text in texts]
    return np.array([i for i in found if i is not None], np.int64)


def encode_sparse(rows: Iterator[SparseRow]) -> bytes:
    """The JSON body in TEI's form: a list of `{index, value}` for each text."""
    return b"[" + b",".join(map(encode_weights, rows)) + b"]"


def encode_weights(row: SparseRow) -> bytes:
    """A list of `{index, value}`."""
    indices, values = row
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    return orjson.dumps([{"index": index, "value": value} for index, value in pairs])
