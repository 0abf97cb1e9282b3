"""Texts and lists of token ids, as callers of `rose.Engine` give them."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from rose.runtime.errors import RequestError

Text = str | Sequence[int]
Ids = npt.NDArray[np.int32]


def as_list(texts: Text | Sequence[Text]) -> list[Text]:
    """Return a list also for a single text or a single list of token ids."""
    if isinstance(texts, str) or (len(texts) and isinstance(texts[0], int | np.integer)):
        return [cast("Text", texts)]
    return list(cast("Sequence[Text]", texts))


def checked_ids(place: str, item: Text | Ids, vocab_size: int) -> Ids:
    """Return a list of token ids as an array.

    Raises:
        RequestError: it is something else, or an id that the model has no row for.
    """
    ids = np.asarray(item)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise RequestError(f"{place} is neither text nor token ids", place)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise RequestError(f"{place}: token ids go from 0 to {vocab_size - 1}", place)
    return ids.astype(np.int32)
