"""Pairs of a query and a document as token ids, in the way that the model was made for.

There are three ways: a prompt with places for both, a chat template, or the tokenizer's own way of
putting two texts together. Special tokens and whatever else is of neither text are never cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rose.models.card import ModelCard, PairTemplate
from rose.serving.gateway.chat_texts import render_pair, template_edges
from rose.serving.gateway.embedding_input import check_known
from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.templates import TemplateError
from rose.serving.gateway.tokenization import GROUP_CHARS, Ids, Tokenizer
from rose.serving.gateway.truncation import Limit

# Each pair of a rendered kind is tokenised with its query: a body of a few kilobytes could ask for
# gigabytes of text.
MAX_RENDERED_CHARS = 1 << 26


@dataclass(frozen=True)
class PairRules:
    """How the pairs of a request are read.

    Attributes:
        limit: Most tokens of a pair, and what happens to one that is longer.
        only_second: Whether a pair is cut at its document alone, and not at the longer text.
        max_document_tokens: What each document is cut to first; None keeps it whole.
        prompt: Text before the query; with a chat template, the system's message.
        instruction: For a prompt that has a place for it; None is the model's own.
    """

    limit: Limit
    only_second: bool = False
    max_document_tokens: int | None = None
    prompt: str = ""
    instruction: str | None = None


@dataclass(frozen=True)
class PreparedPairs:
    """What the engine is asked, and what the answer reports.

    Attributes:
        ids: int32 [tokens] of each pair.
        segments: For models that want them: of which text each token is, int32 [tokens].
        truncated: Tokens that were cut off, over all pairs.
    """

    ids: list[Ids]
    segments: list[Ids] | None
    truncated: int


def prepare_pairs(
    card: ModelCard,
    tokenizer: Tokenizer,
    rules: PairRules,
    queries: Mapping[str, str],
    documents: Mapping[str, str],
) -> PreparedPairs:
    """Turns pairs into ids. CPU work: call it off the event loop.

    Args:
        card: Of a model that scores.
        tokenizer: The model's.
        rules: How pairs are read.
        queries: One query for all documents, or as many as these, by their places in the request.
        documents: By their places in the request.

    Raises:
        ApiError: 400, naming the text at fault.
    """
    facts = card.scoring
    assert facts is not None
    for place, text in queries.items():
        rules.limit.check_length(place, text, tokenizer)
    if rules.max_document_tokens is None:
        for place, text in documents.items():
            rules.limit.check_length(place, text, tokenizer)
    if facts.template is None and facts.chat is None:
        prepared = _TokenizerPairs(tokenizer, rules, facts.segment_ids).prepare(queries, documents)
    else:
        prepared = _RenderedPairs(card, tokenizer, rules).prepare(queries, documents)
    for place, ids in zip(documents, prepared.ids, strict=True):
        if not len(ids):
            raise bad_request(f"'{place}' has no tokens, and neither has its query.", place)
        check_known(place, ids, card.vocab_size)
    return prepared


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept, as the tokenizers library's strategy has it."""
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


class _TokenizerPairs:
    """Pairs that the tokenizer puts together."""

    def __init__(self, tokenizer: Tokenizer, rules: PairRules, segment_ids: bool) -> None:
        self._tokenizer, self._rules, self._segment_ids = tokenizer, rules, segment_ids
        layout = tokenizer.pair_layout
        if layout is None:
            message = "This model's tokenizer does not put two texts together in one way."
            raise bad_request(message, "model")
        self._layout = layout

    def prepare(self, queries: Mapping[str, str], documents: Mapping[str, str]) -> PreparedPairs:
        """Tokenises each text once, and joins them."""
        rules, layout = self._rules, self._layout
        rules.limit.check_room(layout.num_special)
        rules.limit.check_prompt(rules.prompt, len(queries), self._tokenizer)
        prompted = [rules.prompt + query for query in queries.values()]
        first = _encode(self._tokenizer, prompted, rules)
        second = _encode(self._tokenizer, list(documents.values()), rules)
        for place, ids in zip(queries, first, strict=True):
            self._check_query(place, len(ids))
        if len(first) == 1:
            first *= len(second)
        pairs: list[Ids] = []
        segments: list[Ids] = []
        truncated = 0
        for place, one, two in zip(documents, first, second, strict=True):
            kept = self._kept(place, len(one), len(two))
            pairs.append(layout.join(self._cut(one, kept[0]), self._cut(two, kept[1])))
            segments += [layout.segments(*kept)] if self._segment_ids else []
            truncated += len(one) + len(two) - sum(kept)
        return PreparedPairs(pairs, segments if self._segment_ids else None, truncated)

    def _check_query(self, place: str, length: int) -> None:
        """Refuses a query beside which there is no document."""
        limit, taken = self._rules.limit, length + self._layout.num_special
        if not limit.cut and taken > limit.tokens:
            raise limit.too_long(place, f"{taken} tokens")
        if self._rules.only_second and taken >= limit.tokens:
            raise _no_room(place, taken, limit)

    def _kept(self, place: str, first: int, second: int) -> tuple[int, int]:
        """How many tokens of both texts stay."""
        rules, special = self._rules, self._layout.num_special
        second = min(second, rules.max_document_tokens or second)
        room = rules.limit.tokens - special
        if first + second <= room:
            return first, second
        if not rules.limit.cut:
            raise rules.limit.too_long(place, f"{first + second + special} tokens with its query")
        if rules.only_second:
            return first, room - first
        return longest_first(first, second, room)

    def _cut(self, ids: Ids, count: int) -> Ids:
        return ids[len(ids) - count :] if self._rules.limit.side == "left" else ids[:count]


class _RenderedPairs:
    """Pairs that become one text, by a prompt or a chat template."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, rules: PairRules) -> None:
        assert card.scoring is not None
        self._card, self._facts = card, card.scoring
        self._tokenizer, self._rules = tokenizer, rules
        template = card.scoring.template
        around = ["", ""] if template is None else [template.prefix, template.suffix]
        self._prefix, self._suffix = tokenizer.encode(around, add_special_tokens=False)

    def prepare(self, queries: Mapping[str, str], documents: Mapping[str, str]) -> PreparedPairs:
        """Renders and tokenises each pair."""
        edges = [self._edges(*item) for item in queries.items()]
        asked = list(queries.values())
        if len(asked) == 1:
            asked, edges = asked * len(documents), edges * len(documents)
        _check_size(documents, sum(map(len, asked)) + sum(map(len, documents.values())))
        pairs = zip(documents, asked, documents.values(), strict=True)
        encoded = _encode(self._tokenizer, [self._render(*pair) for pair in pairs], self._rules)
        whole = [np.concatenate([self._prefix, ids, self._suffix]) for ids in encoded]
        cut = [self._fit(*item) for item in zip(documents, whole, edges, strict=True)]
        segments = [np.zeros_like(ids) for ids in cut] if self._facts.segment_ids else None
        return PreparedPairs(cut, segments, sum(map(len, whole)) - sum(map(len, cut)))

    def _edges(self, place: str, query: str) -> tuple[int, int]:
        """Tokens before and behind a document, which stay whatever is cut."""
        limit = self._rules.limit
        head, tail = template_edges(self._tokenizer, partial(self._render, place, query))
        edges = len(self._prefix) + head, len(self._suffix) + tail
        if sum(edges) >= limit.tokens:
            raise _no_room(place, sum(edges), limit)
        return edges

    def _fit(self, place: str, ids: Ids, edges: tuple[int, int]) -> Ids:
        limit, most = self._rules.limit, self._rules.max_document_tokens
        if most is not None:
            ids = self._tokenizer.cut(ids, sum(edges) + most, limit.side, *edges)
        return limit.fit(place, ids, self._tokenizer, *edges)

    def _render(self, place: str, query: str, document: str) -> str:
        facts, rules = self._facts, self._rules
        if facts.template is not None:
            return _fill(facts.template, rules, query, document)
        assert facts.chat is not None
        prompt = rules.prompt if rules.instruction is None else rules.instruction
        try:
            return render_pair(self._card.tokenizer, facts.chat, query, document, prompt)
        except TemplateError as error:
            raise bad_request(f"'{place}': {error}.", place) from error


def _check_size(documents: Mapping[str, str], chars: int) -> None:
    if chars > MAX_RENDERED_CHARS:
        field = next(iter(documents)).partition("[")[0]
        message = (
            f"'{field}' and the query before each make {chars} characters; at most "
            f"{MAX_RENDERED_CHARS} a request."
        )
        raise bad_request(message, field)


def _fill(template: PairTemplate, rules: PairRules, query: str, document: str) -> str:
    instruction = template.instruction if rules.instruction is None else rules.instruction
    return template.body.format(
        instruction=instruction, query=rules.prompt + query, document=document
    )


def _encode(tokenizer: Tokenizer, texts: Sequence[str], rules: PairRules) -> list[Ids]:
    """Token ids of texts, without special tokens; of very long ones, the ends that may stay."""
    cut = rules.limit.cut or rules.max_document_tokens is not None
    if not cut or max(map(len, texts)) <= GROUP_CHARS:
        return tokenizer.encode(texts, add_special_tokens=False)
    limit = rules.limit.tokens
    return [tokenizer.encode_ends(text, limit, add_special_tokens=False) for text in texts]


def _no_room(place: str, taken: int, limit: Limit) -> ApiError:
    message = (
        f"'{place}' leaves no room for a document: with what is around it, it takes {taken} of "
        f"{limit.tokens} tokens."
    )
    return bad_request(message, place, "context_length_exceeded")
