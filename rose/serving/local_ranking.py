"""Scores, ranks and classes in this process, for `rose.Engine`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rose.models.output import activate_scores, probabilities
from rose.runtime.build import ServedModel
from rose.runtime.errors import NonFiniteError, RequestError
from rose.serving.gateway.classes import prepare_items
from rose.serving.gateway.errors import ApiError
from rose.serving.gateway.pairs import PairRules, PreparedPairs, prepare_pairs
from rose.serving.gateway.tokenization import TextError, Tokenizer
from rose.serving.gateway.truncation import Limit
from rose.serving.local_rows import Progress, run_rows

if TYPE_CHECKING:
    from rose.models.card import ScoringCard
    from rose.runtime.embedding import EmbeddingRuntime

Floats = npt.NDArray[np.float64]
TextOrPair = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's place in the list, and its score."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Classified:
    """The most probable label, its probability, and those of all labels in the model's order."""

    label: str
    score: float
    probabilities: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """How pairs are read; the fields are arguments of `Engine.score`."""

    instruction: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    truncate: bool = False
    max_tokens_per_doc: int | None = None


class Encoded(NamedTuple):
    """Pairs or texts as tokens, and their places for messages."""

    work: PreparedPairs
    places: list[str]

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return sum(map(len, self.work.ids))

    @property
    def truncated(self) -> int:
        """Tokens that were cut off."""
        return self.work.truncated


class LocalRanker:
    """Scores with a loaded model."""

    def __init__(self, served: ServedModel, tokenizer: Tokenizer) -> None:
        """Use the runtime of `served` that scores.

        Raises:
            RequestError: it has none.
        """
        card = served.card
        if served.scoring is None or card.scoring is None:
            can = ", ".join(card.tasks)
            message = f"model {card.name!r} cannot score; it can: {can}"
            if card.embedding is not None and "dense" in card.embedding.outputs:
                message += "; with rank_by_cosine=True embedders score too"
            raise RequestError(message, "model")
        self._served, self._card, self._tokenizer = served, card, tokenizer
        self._runtime: EmbeddingRuntime = served.scoring
        self._facts: ScoringCard = card.scoring

    def encode(
        self, query: str | Sequence[str], documents: Sequence[str], options: PairOptions
    ) -> Encoded:
        """Turn pairs into tokens: one query for all documents, or one for each.

        Raises:
            RequestError: a text or an option does not fit.
        """
        self._check_task("score")
        documents = list(documents)
        places = [f"documents[{i}]" for i in range(len(documents))]
        if isinstance(query, str):
            queries = {"query": query}
        else:
            queries = {f"query[{i}]": text for i, text in enumerate(query)}
            if len(queries) != len(documents):
                message = f"query: {len(queries)} texts for {len(documents)} documents"
                raise RequestError(message, "query")
        check_texts([*queries.items(), *zip(places, documents, strict=True)])
        if not documents:
            return Encoded(PreparedPairs([], None, 0), [])
        rules = self._rules(options)
        texts = dict(zip(places, documents, strict=True))
        with plainly():
            return Encoded(
                prepare_pairs(self._card, self._tokenizer, rules, queries, texts), places
            )

    def joined(self, parts: Sequence[Encoded]) -> Encoded:
        """Put several lists of pairs together."""
        segments = [row for part in parts for row in part.work.segments or ()]
        work = PreparedPairs(
            [ids for part in parts for ids in part.work.ids],
            segments or None,
            sum(part.truncated for part in parts),
        )
        return Encoded(work, [place for part in parts for place in part.places])

    def raw(self, encoded: Encoded, progress: Progress | None = None) -> Floats:
        """Compute raw scores, float64 [pairs, labels].

        Raises:
            NonFiniteError: the model computed NaN or infinity; names the text.
        """
        width = len(self._facts.labels)
        if not encoded.places:
            return np.zeros((0, width))
        try:
            rows = run_rows(
                self._runtime,
                encoded.work.ids,
                width=width,
                batch_tokens=self._served.max_score_tokens,
                segments=encoded.work.segments,
                progress=progress,
            )
        except NonFiniteError as error:
            place = encoded.places[int(str(error.field)[len("input[") : -1])]
            raise NonFiniteError(f"the model computed NaN or infinity for {place}", place) from None
        return rows.astype(np.float64)

    def activated(self, raw: Floats) -> Floats:
        """Return raw scores as the checkpoint wants them shown."""
        return activate_scores(raw, self._facts.activation)

    def classify(
        self, items: Sequence[TextOrPair], options: PairOptions, progress: Progress | None
    ) -> list[Classified]:
        """Classify texts and pairs; errors are those of `encode` and `raw`."""
        self._check_task("classify")
        named = {f"texts[{i}]": item for i, item in enumerate(items)}
        _check_items(named)
        if not named:
            return []
        with plainly():
            work = prepare_items(self._card, self._tokenizer, self._rules(options), named)
        raw = self.raw(Encoded(work, list(named)), progress)
        rows = probabilities(raw, self._facts.probabilities)
        return [self._classified(row) for row in rows]

    def _classified(self, row: Floats) -> Classified:
        best = int(np.argmax(row))
        labels = self._facts.labels
        return Classified(
            labels[best], float(row[best]), dict(zip(labels, row.tolist(), strict=True))
        )

    def _check_task(self, task: str) -> None:
        if task not in self._card.tasks:
            can = ", ".join(self._card.tasks)
            raise RequestError(f"model {self._card.name!r} cannot {task}; it can: {can}", "model")

    def _rules(self, options: PairOptions) -> PairRules:
        if options.max_tokens_per_doc is not None and options.max_tokens_per_doc < 1:
            message = f"max_tokens_per_doc: at least 1, not {options.max_tokens_per_doc}"
            raise RequestError(message, "max_tokens_per_doc")
        facts = self._facts
        if options.instruction and facts.template is None and facts.chat is None:
            message = "instruction: the model's prompt has no place for one; prompt goes anywhere"
            raise RequestError(message, "instruction")
        side = self._card.tokenizer.truncation_side
        cut_documents = options.max_tokens_per_doc is not None
        cut = options.truncate or cut_documents
        return PairRules(
            limit=Limit(self._card.max_model_len, cut, side, "truncate"),
            only_second=cut_documents and not options.truncate,
            max_document_tokens=options.max_tokens_per_doc,
            prompt=self._prompt(options),
            instruction=options.instruction,
        )

    def _prompt(self, options: PairOptions) -> str:
        if options.prompt is not None:
            return options.prompt
        facts = self._facts
        name = facts.default_prompt_name if options.prompt_name is None else options.prompt_name
        if name is None:
            return ""
        if name not in facts.prompts:
            known = ", ".join(sorted(facts.prompts)) or "none"
            raise RequestError(f"unknown prompt {name!r}; the model has: {known}", "prompt_name")
        return facts.prompts[name]


def ranked(raw: Floats, scores: Floats, top_n: int | None) -> list[Ranked]:
    """Order documents by their raw scores, the best first; equal ones stay in order."""
    if top_n is not None and top_n < 1:
        raise RequestError(f"top_n: at least 1, not {top_n}", "top_n")
    order = np.argsort(-raw, kind="stable")[:top_n]
    return [Ranked(int(index), float(scores[index])) for index in order]


@contextmanager
def plainly() -> Iterator[None]:
    """Turn the gateway's errors into those of this process."""
    try:
        yield
    except ApiError as error:
        message = error.message.replace("send 'truncate': true", "pass truncate=True")
        raise RequestError(message, error.param) from error
    except TextError as error:
        raise RequestError(str(error)) from error


def check_texts(named: Sequence[tuple[str, object]]) -> None:
    """Refuse what is no text, by its place.

    Raises:
        RequestError: one is not.
    """
    for place, text in named:
        if not isinstance(text, str):
            raise RequestError(f"{place}: a text is expected, not {type(text).__name__}", place)


def _check_items(items: dict[str, TextOrPair]) -> None:
    for place, item in items.items():
        parts: Sequence[object] = [item] if isinstance(item, str) else list(item)
        if not 1 <= len(parts) <= 2 or (len(parts) == 1 and not isinstance(item, str)):
            raise RequestError(f"{place}: a text or a pair of texts is expected", place)
        check_texts([(place, part) for part in parts])
