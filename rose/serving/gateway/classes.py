"""Texts and pairs to classify, as token ids."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from rose.models.card import ModelCard
from rose.serving.gateway.chat_texts import render_text, template_edges
from rose.serving.gateway.embedding_input import Texts, check_known
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.pairs import PairRules, PreparedPairs, prepare_pairs
from rose.serving.gateway.templates import TemplateError
from rose.serving.gateway.tokenization import Ids, Tokenizer

Items = Mapping[str, str | tuple[str, str]]  # by their places in the request


def prepare_items(
    card: ModelCard, tokenizer: Tokenizer, rules: PairRules, items: Items
) -> PreparedPairs:
    """Turns texts and pairs into ids. CPU work: call it off the event loop.

    Raises:
        ApiError: 400, naming the text at fault.
    """
    texts = {place: item for place, item in items.items() if isinstance(item, str)}
    pairs = {place: item for place, item in items.items() if not isinstance(item, str)}
    parts = []
    if texts:
        parts.append((texts, _prepare_texts(card, tokenizer, rules, texts)))
    if pairs:
        first = {place: pair[0] for place, pair in pairs.items()}
        second = {place: pair[1] for place, pair in pairs.items()}
        parts.append((second, prepare_pairs(card, tokenizer, rules, first, second)))
    if len(parts) == 1:
        return parts[0][1]
    return _in_order(items, parts)


def _in_order(items: Items, parts: list[tuple[dict[str, str], PreparedPairs]]) -> PreparedPairs:
    ids: dict[str, Ids] = {}
    segments: dict[str, Ids] = {}
    for places, part in parts:
        ids |= zip(places, part.ids, strict=True)
        segments |= zip(places, part.segments or (), strict=False)
    return PreparedPairs(
        [ids[place] for place in items],
        [segments[place] for place in items] if segments else None,
        sum(part.truncated for _, part in parts),
    )


def _prepare_texts(
    card: ModelCard, tokenizer: Tokenizer, rules: PairRules, texts: Mapping[str, str]
) -> PreparedPairs:
    """Turns single texts into ids: all of their tokens are of the first segment."""
    assert card.scoring is not None
    chat, place = card.scoring.chat, next(iter(texts))
    if chat is None:
        work = Texts(tokenizer, rules.limit, True, rules.prompt).prepare(texts)
    else:
        render = partial(render_text, card.tokenizer, chat, prompt=rules.prompt)
        try:
            edges = template_edges(tokenizer, render) if rules.limit.cut else (0, 0)
            rendered = {}
            for place, text in texts.items():
                rendered[place] = render(text)
        except TemplateError as error:
            raise bad_request(f"'{place}': {error}.", place) from error
        work = Texts(tokenizer, rules.limit, False, edges=edges).prepare(rendered)
    for place, ids in zip(texts, work.ids, strict=True):
        check_known(place, ids, card.vocab_size)
    wanted = card.scoring.segment_ids
    segments = [np.zeros_like(ids) for ids in work.ids] if wanted else None
    return PreparedPairs(work.ids, segments, work.truncated)
