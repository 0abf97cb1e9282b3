"""Ranking by the cosine of an embedder's vectors in this process, for `rose.Engine`."""

from collections.abc import Sequence

import numpy as np

from rose.models.card import Side
from rose.models.output import finish
from rose.runtime.build import ServedModel
from rose.runtime.errors import RequestError
from rose.runtime.options import EmbedOptions
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local_outputs import FloatRows, Ids
from rose.serving.local_ranking import Floats, PairOptions
from rose.serving.local_rows import Progress, run_rows
from rose.serving.local_vectors import TextPairs, VectorRanker, placed


class CosineRanker(VectorRanker):
    """Scores with a loaded embedder by the vectors of texts."""

    def __init__(self, served: ServedModel, tokenizer: Tokenizer) -> None:
        """Use the runtime of `served` that embeds.

        Raises:
            RequestError: the model gives no vectors of texts.
        """
        card = served.card
        if card.embedding is None or "dense" not in card.embedding.outputs:
            can = ", ".join(card.tasks)
            message = f"model {card.name!r} cannot rank by cosine; it can: {can}"
            raise RequestError(message, "model")
        super().__init__(served, tokenizer)

    def raw(self, encoded: TextPairs, progress: Progress | None = None) -> Floats:
        """Compute cosines, float64 [pairs, 1].

        Raises:
            NonFiniteError: the model computed NaN or infinity; names the text.
        """
        if not encoded.documents:
            return np.zeros((0, 1))
        with placed(["query"] * len(encoded.queries)):
            asked = self._unit(encoded.queries, encoded.skips[0], None)
        with placed(encoded.places):
            found = self._unit(encoded.documents, encoded.skips[1], progress)
        products = asked[encoded.query_of].astype(np.float64) * found.astype(np.float64)
        cosines: Floats = np.clip(products.sum(axis=1, keepdims=True), -1, 1)
        return cosines

    def _unit(self, ids: Sequence[Ids], skip: int, progress: Progress | None) -> FloatRows:
        """Return vectors of length 1, float32 [texts, D]."""
        rows = run_rows(
            self._runtime,
            ids,
            width=self._facts.dimensions,
            batch_tokens=self._served.max_batch_tokens,
            skip=skip,
            progress=progress,
        )
        options = EmbedOptions(normalize=True)
        unit: FloatRows = finish(rows, options, self._facts.normalize, self._facts.quantizer)
        return unit

    def _request(self, texts: Sequence[str], side: Side, options: PairOptions) -> EmbeddingRequest:
        request = super()._request(texts, side, options)
        if request.prompt is not None or request.prompt_name is not None:
            request.input_type = None  # the prompt takes its place
        return request
