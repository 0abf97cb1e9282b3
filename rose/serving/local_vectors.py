"""Ranking by an embedder's vectors in this process: what its two ways have in common."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from rose.models.card import Side
from rose.runtime.build import ServedModel
from rose.runtime.errors import NonFiniteError, RequestError
from rose.serving.gateway.embedding_input import Prepared, prepare
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local_outputs import Ids
from rose.serving.local_ranking import (
    Classified,
    Floats,
    PairOptions,
    TextOrPair,
    check_texts,
    plainly,
)
from rose.serving.local_rows import Progress


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Queries and documents as tokens, each by itself.

    `query_of` has the index of each document's query; it never falls. `skips` are the leading
    tokens of queries and of documents that are not pooled.
    """

    queries: list[Ids]
    documents: list[Ids]
    query_of: list[int]
    places: list[str]
    truncated: int = 0
    skips: tuple[int, int] = (0, 0)

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return sum(map(len, self.queries)) + sum(map(len, self.documents))


class VectorRanker(ABC):
    """Scores with a loaded model that embeds each text by itself."""

    def __init__(self, served: ServedModel, tokenizer: Tokenizer) -> None:
        """Use the runtime of `served` that embeds."""
        assert served.embedding is not None
        assert served.card.embedding is not None
        self._served, self._card, self._tokenizer = served, served.card, tokenizer
        self._runtime, self._facts = served.embedding, served.card.embedding

    @abstractmethod
    def raw(self, encoded: TextPairs, progress: Progress | None = None) -> Floats:
        """Compute scores, float64 [pairs, 1].

        Raises:
            NonFiniteError: the model computed NaN or infinity; names the text.
        """

    def encode(
        self, query: str | Sequence[str], documents: Sequence[str], options: PairOptions
    ) -> TextPairs:
        """Turn pairs into tokens: one query for all documents, or one for each.

        Raises:
            RequestError: a text or an option does not fit.
        """
        _check_options(options)
        documents, one = list(documents), isinstance(query, str)
        queries = [query] if isinstance(query, str) else list(query)
        if not one and len(queries) != len(documents):
            message = f"query: {len(queries)} texts for {len(documents)} documents"
            raise RequestError(message, "query")
        names = ["query"] if one else [f"query[{i}]" for i in range(len(queries))]
        places = [f"documents[{i}]" for i in range(len(documents))]
        check_texts([*zip(names, queries, strict=True), *zip(places, documents, strict=True)])
        if not documents:
            return TextPairs([], [], [], [])
        asked = self._prepare(queries, "query", options, names)
        found = self._prepare(documents, "document", options, places)
        return TextPairs(
            asked.ids,
            found.ids,
            [0 if one else i for i in range(len(documents))],
            places,
            asked.truncated + found.truncated,
            (asked.pool_from, found.pool_from),
        )

    def joined(self, parts: Sequence[TextPairs]) -> TextPairs:
        """Put several lists of pairs together."""
        starts = np.cumsum([0, *(len(part.queries) for part in parts)]).tolist()
        return TextPairs(
            [ids for part in parts for ids in part.queries],
            [ids for part in parts for ids in part.documents],
            [s + i for s, part in zip(starts, parts, strict=False) for i in part.query_of],
            [place for part in parts for place in part.places],
            sum(part.truncated for part in parts),
            max((part.skips for part in parts), default=(0, 0)),
        )

    def activated(self, raw: Floats) -> Floats:
        """Return scores as they are."""
        return raw

    def classify(
        self,
        items: Sequence[TextOrPair],  # noqa: ARG002 - it cannot
        options: PairOptions,  # noqa: ARG002
        progress: Progress | None,  # noqa: ARG002
    ) -> list[Classified]:
        """Refuse: there are no classes."""
        can = ", ".join(self._card.tasks)
        raise RequestError(f"model {self._card.name!r} cannot classify; it can: {can}", "model")

    def _prepare(
        self, texts: Sequence[str], side: Side, options: PairOptions, places: Sequence[str]
    ) -> Prepared:
        body = self._request(texts, side, options)
        settings = GatewaySettings(max_inputs=len(texts))
        with placed(places), plainly():
            return prepare(body, self._card, self._tokenizer, settings)

    def _request(self, texts: Sequence[str], side: Side, options: PairOptions) -> EmbeddingRequest:
        is_query = side == "query"
        most = None if is_query else options.max_tokens_per_doc
        return EmbeddingRequest(
            input=list(texts),
            input_type=side,
            prompt=options.prompt if is_query else None,
            prompt_name=options.prompt_name if is_query and options.prompt is None else None,
            truncate=options.truncate if most is None else None,
            truncate_prompt_tokens=None if most is None else min(most, self._card.max_model_len),
        )


def _check_options(options: PairOptions) -> None:
    if options.instruction:
        message = "instruction: the model reads none; prompt goes before the query"
        raise RequestError(message, "instruction")
    if options.max_tokens_per_doc is not None and options.max_tokens_per_doc < 1:
        message = f"max_tokens_per_doc: at least 1, not {options.max_tokens_per_doc}"
        raise RequestError(message, "max_tokens_per_doc")


@contextmanager
def placed(places: Sequence[str]) -> Iterator[None]:
    """Name the texts in errors as the arguments do."""
    try:
        yield
    except (RequestError, NonFiniteError) as error:
        match = re.fullmatch(r"input\[(\d+)\]", error.field or "")
        if match is None:
            raise
        place = places[int(match[1])]
        raise type(error)(str(error).replace(str(error.field), place), place) from error
