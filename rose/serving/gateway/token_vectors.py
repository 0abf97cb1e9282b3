"""Vectors of tokens after they were computed: which of them count, and the scores they give."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.models.card import LateInteraction, Side
from rose.serving.gateway.tokenization import Ids

Rows = npt.NDArray[Any]
SCORES_AT_ONCE = 1 << 22  # dot products that are held at one time: 16 MB


def of_texts(
    rows: Rows, ids: Sequence[Ids], late: LateInteraction | None = None, side: Side = "document"
) -> list[Rows]:
    """The rows of each text, [tokens, width], without those of tokens that do not count.

    Args:
        rows: [tokens of all texts, width].
        ids: int32 [tokens] of each text.
        late: Which tokens do not count.
        side: What the texts are.
    """
    parts = np.split(rows, np.cumsum([len(row) for row in ids])[:-1])
    if late is None or side not in late.skip_sides or not late.skip_ids:
        return parts
    skipped = np.array(late.skip_ids)
    return [part[~np.isin(row, skipped)] for part, row in zip(parts, ids, strict=True)]


def maxsim(
    queries: Sequence[Rows], documents: Sequence[Rows], *, mean: bool = False
) -> npt.NDArray[np.float64]:
    """The score of each document: the sum of what its best vectors have in common with a query's.

    Args:
        queries: [tokens, width] of each, one for all documents or one for each.
        documents: [tokens, width] of each.
        mean: Divide by the query's tokens.

    Returns:
        [documents]. One without vectors has 0.
    """
    scores = np.zeros(len(documents))
    step = _documents_at_once(queries, documents)
    if len(queries) == 1:
        for start in range(0, len(documents), step):
            part = documents[start : start + step]
            scores[start : start + len(part)] = _one_query(queries[0], part)
    else:
        pairs = zip(queries, documents, strict=True)
        scores[:] = [_one_query(query, [document])[0] for query, document in pairs]
    if mean:
        scores /= np.maximum(1, [len(query) for query in queries])
    return scores


def _documents_at_once(queries: Sequence[Rows], documents: Sequence[Rows]) -> int:
    tokens = max(map(len, documents), default=1) * len(queries[0])
    return max(1, SCORES_AT_ONCE // max(1, tokens))


def _one_query(query: Rows, documents: Sequence[Rows]) -> npt.NDArray[np.float64]:
    full = [i for i, document in enumerate(documents) if len(document)]
    scores = np.zeros(len(documents))
    if not full or not len(query):
        return scores
    rows = np.concatenate([documents[i] for i in full])
    starts = np.cumsum([0, *(len(documents[i]) for i in full)])[:-1]
    best = np.maximum.reduceat(rows @ query.T, starts, axis=0)
    scores[full] = best.sum(axis=1, dtype=np.float64)
    return scores
