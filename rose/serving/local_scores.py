"""The methods of `rose.Engine` that score, rank and classify."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.runtime.build import ServedModel
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local_cosine import CosineRanker
from rose.serving.local_late import LateRanker
from rose.serving.local_ranking import (
    Classified,
    LocalRanker,
    PairOptions,
    Ranked,
    TextOrPair,
    ranked,
)
from rose.serving.local_rows import Progress
from rose.serving.local_vectors import VectorRanker

# One that reads pairs, or one that compares vectors; each with pairs of its own.
Ranker = LocalRanker | VectorRanker


class ScoreMethods:
    """What an engine does with a model that scores."""

    _served: ServedModel
    _tokenizer: Tokenizer
    _ranker: Ranker | None = None
    _rank_by_cosine: bool = False

    def score(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = False,
        max_tokens_per_doc: int | None = None,
        raw_scores: bool = False,
        progress: Progress | None = None,
    ) -> npt.NDArray[np.float32]:
        """Score documents by a query.

        Args:
            query: what is looked for; or a sequence of queries, one for each document.
            documents: texts.
            instruction: for models whose prompt has a place for one.
            prompt_name: name of a prompt of the checkpoint that goes before each query.
            prompt: text that goes before each query; wins over `prompt_name`.
            truncate: cut pairs that are longer than the model allows instead of refusing them.
            max_tokens_per_doc: cut each document to so many tokens, and further where its pair is
                still too long.
            raw_scores: leave out the checkpoint's activation.
            progress: called with (pairs done, pairs in all) as batches finish.

        Returns:
            float32 [len(documents)].

        Raises:
            RequestError: an argument does not fit, or the model does not score; `field` names it.
            NonFiniteError: the model computed NaN or infinity.
        """
        options = PairOptions(
            instruction=instruction,
            prompt_name=prompt_name,
            prompt=prompt,
            truncate=truncate,
            max_tokens_per_doc=max_tokens_per_doc,
        )
        ranker = self.ranker()
        raw = ranker.raw(ranker.encode(query, documents, options), progress)[:, 0]
        scores: npt.NDArray[np.float64] = raw if raw_scores else ranker.activated(raw)
        return scores.astype(np.float32)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        **options: Any,  # noqa: ANN401 - those of `score`
    ) -> list[Ranked]:
        """Order documents by their scores for a query, the best first; equal ones stay in order.

        Args:
            query: what is looked for.
            documents: texts.
            top_n: give the best so many; None gives all.
            raw_scores: leave out the checkpoint's activation.
            options: the other arguments of `score`.

        Returns:
            Indices of documents with their scores. Errors are those of `score`.
        """
        raw = self.score(query, documents, raw_scores=True, **options).astype(np.float64)
        return ranked(raw, raw if raw_scores else self.ranker().activated(raw), top_n)

    def classify(
        self,
        texts: TextOrPair | Sequence[TextOrPair],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> list[Classified]:
        """Classify texts.

        Args:
            texts: one or a sequence of them; a pair of texts is a tuple.
            prompt_name: name of a prompt of the checkpoint that goes before each text.
            prompt: text that goes before each text; wins over `prompt_name`.
            truncate: cut what is longer than the model allows instead of refusing it.
            progress: called with (texts done, texts in all) as batches finish.

        Returns:
            Label and probabilities of each text.

        Raises:
            RequestError: an argument does not fit, or the model is no classifier.
            NonFiniteError: the model computed NaN or infinity.
        """
        items = [texts] if isinstance(texts, str | tuple) else list(texts)
        options = PairOptions(prompt_name=prompt_name, prompt=prompt, truncate=truncate)
        found: list[Classified] = self.ranker().classify(items, options, progress)
        return found

    def ranker(self) -> Any:  # noqa: ANN401 - a `Ranker`, whose pairs no caller looks into
        """Return what scores.

        Raises:
            RequestError: the model does not.
        """
        if self._ranker is None:
            self._ranker = self._kind()(self._served, self._tokenizer)
        return self._ranker

    def _kind(self) -> type[Ranker]:
        card = self._served.card
        if card.embedding is not None and card.embedding.late is not None:
            return LateRanker
        if card.scoring is None and self._rank_by_cosine:
            return CosineRanker
        return LocalRanker
