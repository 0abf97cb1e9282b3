"""Texts and lists of token ids, as callers of `rose.Engine` give them."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import cast

import numpy as np
import numpy.typing as npt

from rose.models.card import EmbeddingCard
from rose.models.output import check_output
from rose.runtime.errors import RequestError
from rose.runtime.options import EmbedOptions

Text = str | Sequence[int]
Ids = npt.NDArray[np.int32]


def as_list(texts: Text | Sequence[Text]) -> list[Text]:
    """Return a list also for a single text or a single list of token ids.

    Raises:
        RequestError: it is something that is no text and has none in an order.
    """
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | Mapping | Set) or not isinstance(texts, Iterable):
        raise RequestError(f"texts or token ids are expected, not {type(texts).__name__}", "input")
    items = list(cast("Iterable[Text]", texts))
    if items and isinstance(items[0], int | np.integer):
        return [cast("Text", items)]
    return items


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


def plain_text(place: str, item: Text) -> str | list[int]:
    """Return a text or a list of token ids as a request has it: free of numpy.

    Raises:
        RequestError: it is something else.
    """
    if isinstance(item, str):
        return str(item)
    ids = np.asarray(item)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise RequestError(f"{place} is neither text nor token ids", place)
    return [int(token) for token in ids]


def checked_output(options: EmbedOptions, facts: EmbeddingCard) -> EmbedOptions:
    """Return how dense vectors are finished, checked before any are computed.

    Raises:
        RequestError: it is not possible.
    """
    try:
        check_output(options, facts.dimensions, facts.normalize, facts.quantizer)
    except ValueError as error:  # it begins with the field's name
        raise RequestError(str(error), str(error).partition(":")[0]) from None
    return options
