"""Ranking by vectors of tokens in this process, for `rose.Engine`."""

from collections.abc import Iterator, Sequence

import numpy as np

from rose.models.card import LateInteraction, Side
from rose.runtime.build import ServedModel
from rose.runtime.errors import RequestError
from rose.serving.gateway.embedding_input import Prepared
from rose.serving.gateway.token_vectors import maxsim, of_texts
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local_outputs import FloatRows, Ids, run_outputs
from rose.serving.local_ranking import Floats
from rose.serving.local_rows import Progress
from rose.serving.local_types import unseen_token
from rose.serving.local_vectors import TextPairs, VectorRanker, placed

MAX_QUERY_NUMBERS = 1 << 23  # of vectors of queries that are held at one time: 32 MB


class LateRanker(VectorRanker):
    """Scores with a loaded late-interaction model."""

    def __init__(self, served: ServedModel, tokenizer: Tokenizer) -> None:
        """Use the runtime of `served` that embeds.

        Raises:
            RequestError: the model is served for other tasks.
        """
        if "score" not in served.card.tasks:
            can = ", ".join(served.card.tasks)
            raise RequestError(f"model {served.card.name!r} cannot score; it can: {can}", "model")
        super().__init__(served, tokenizer)

    def raw(self, encoded: TextPairs, progress: Progress | None = None) -> Floats:
        """Compute scores, float64 [pairs, 1].

        The vectors of few enough queries are held at a time, and those of the documents of the
        batches that run.

        Raises:
            NonFiniteError: the model computed NaN or infinity; names the text.
        """
        scores = np.zeros((len(encoded.documents), 1))
        for done, (index, score) in enumerate(self._scores(encoded)):
            scores[index] = score
            if progress:
                progress(done + 1, len(encoded.documents))
        return scores

    def _scores(self, encoded: TextPairs) -> Iterator[tuple[int, float]]:
        """Compute the score of each document, in any order."""
        size = max(1, MAX_QUERY_NUMBERS // (self._facts.dimensions * self._late().query_length))
        for start in range(0, len(encoded.queries), size):
            with placed(["query"] * size):
                asked = self._vectors(encoded.queries[start : start + size], "query")
                queries = {start + index: rows for index, rows in asked}
            first, last = np.searchsorted(encoded.query_of, (start, start + size)).tolist()
            with placed(encoded.places[first:last]):
                for index, rows in self._vectors(encoded.documents[first:last], "document"):
                    query = queries[encoded.query_of[first + index]]
                    yield first + index, maxsim([query], [rows], mean=self._late().mean)[0]

    def _late(self) -> LateInteraction:
        assert self._facts.late is not None
        return self._facts.late

    def _vectors(self, ids: Sequence[Ids], side: Side) -> Iterator[tuple[int, FloatRows]]:
        unseen = unseen_token(self._facts, Prepared([], 0, 0, side))
        found = run_outputs(
            self._runtime,
            ids,
            ("multi_vector",),
            batch_tokens=self._served.max_batch_tokens,
            unseen_token=unseen,
        )
        for index, (rows,) in found:
            yield index, of_texts(rows, [ids[index]], self._late(), side)[0]
