"""From an embedding request to token ids and options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rose.models.card import EmbeddingCard, LateInteraction, ModelCard, Side
from rose.runtime.options import EmbedOptions, OutputDtype
from rose.serving.gateway.chat_texts import render_text, template_edges
from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.late_input import fill_query, late_limit, late_prompt, mark, side_of
from rose.serving.gateway.prompts import choose_prompt, refuse_prompt, render_conversation
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.templates import TemplateError
from rose.serving.gateway.tokenization import GROUP_CHARS, Ids, Tokenizer
from rose.serving.gateway.truncation import Limit, limit_of

SHORT_CHARS = 1024
_UNSUPPORTED = (
    *("chat_template", "late_chunking", "return_multivector", "embedding_types"),
    *("output_dimension", "embedding_type", "pooling", "pooling_type"),
)
# Names of other servers, what is the same here, and values that ask for what is done anyhow.
_ELSEWHERE: dict[str, tuple[str, tuple[object, ...]]] = {
    "embed_dtype": ("'output_dtype'", ("float32",)),
    "endianness": ("little-endian bytes", ("native", "little")),
    "instruction": ("'prompt'", ("",)),
    "normalized": ("'normalize'", ()),
    "task": ("'input_type'", ("",)),
    "truncation": ("'truncate'", ()),
    "use_activation": ("'normalize'", ()),
}


@dataclass(frozen=True)
class Prepared:
    """What the engine is asked, and what the answer reports.

    Attributes:
        ids: int32 [tokens] of each text.
        pool_from: Leading tokens of each text that pooling leaves out.
        truncated: Tokens that were cut off, over all texts.
        side: What the texts are, for a late-interaction model; None for others.
    """

    ids: list[Ids]
    pool_from: int
    truncated: int
    side: Side | None = None


def check_supported(body: EmbeddingRequest) -> None:
    """Refuses what changes the answer and is not supported, and a request without input.

    Raises:
        ApiError: 400.
    """
    for name in _UNSUPPORTED:
        if getattr(body, name):
            raise bad_request(f"'{name}' is not supported.", name)
    for name, (here, neutral) in _ELSEWHERE.items():
        if (value := getattr(body, name)) is not None and value not in neutral:
            raise bad_request(f"'{name}' is not supported: use {here}.", name)
    if body.input is None and body.messages is None:
        raise bad_request("'input' is missing.", "input")
    if body.input is not None and body.messages is not None:
        raise bad_request("Give 'input' or 'messages', not both.", "messages")


def options_of(
    body: EmbeddingRequest, card: EmbeddingCard, settings: GatewaySettings
) -> EmbedOptions:
    """How vectors are finished.

    Raises:
        ApiError: 400, `dimensions` or the output type is impossible.
    """
    if body.dimensions is not None:
        _check_dimensions(body.dimensions, card, settings.strict_dimensions)
    return EmbedOptions(
        dimensions=body.dimensions, normalize=body.normalize, output_dtype=_output_dtype(body)
    )


def is_short(body: EmbeddingRequest, card: EmbeddingCard) -> bool:
    """Whether a request is one text that is tokenised before a thread for it would be awake."""
    if card.chat is not None or card.late is not None or not isinstance(body.input, str):
        return False
    return len(body.input) + len(choose_prompt(body, card)) <= SHORT_CHARS


def prepare(
    body: EmbeddingRequest, card: ModelCard, tokenizer: Tokenizer, settings: GatewaySettings
) -> Prepared:
    """Turns the request's texts into ids. CPU work: call it off the event loop, unless it is short.

    Raises:
        ApiError: 400, naming the text at fault.
    """
    prepared = _prepare(body, card, tokenizer, settings)
    several = isinstance(body.input, list) and not isinstance(body.input[0], int)
    whole = "input" if body.messages is None else "messages"
    for i, ids in enumerate(prepared.ids):
        check_known(f"input[{i}]" if several else whole, ids, card.vocab_size)
    return prepared


def _prepare(
    body: EmbeddingRequest, card: ModelCard, tokenizer: Tokenizer, settings: GatewaySettings
) -> Prepared:
    assert card.embedding is not None
    limit = limit_of(body, card, settings)
    if card.embedding.late is not None:
        return _prepare_late(body, card, card.embedding.late, tokenizer, settings, limit)
    if body.messages is not None:
        refuse_prompt(body, "messages")
        text = render_conversation(body, body.messages, card)
        return Texts(tokenizer, limit, bool(body.add_special_tokens)).prepare({"messages": text})
    texts, ids = _input_form(body, settings)
    if ids:
        refuse_prompt(body, "token ids")
        return _prepare_ids(ids, card, tokenizer, limit)
    prompt = choose_prompt(body, card.embedding)
    if card.embedding.chat is not None:
        return _prepare_chat(body, card, tokenizer, limit, texts, prompt)
    job = Texts(tokenizer, limit, body.add_special_tokens is not False, prompt)
    return job.prepare(texts, pools_prompt=card.embedding.pools_prompt)


def _prepare_ids(
    ids: Mapping[str, Sequence[int]], card: ModelCard, tokenizer: Tokenizer, limit: Limit
) -> Prepared:
    whole = {place: _id_row(place, row, card.vocab_size) for place, row in ids.items()}
    return _prepared(whole, [limit.fit(*item, tokenizer) for item in whole.items()])


def _prepare_late(
    body: EmbeddingRequest,
    card: ModelCard,
    late: LateInteraction,
    tokenizer: Tokenizer,
    settings: GatewaySettings,
    limit: Limit,
) -> Prepared:
    """Turns queries or documents into ids; token ids are those of a whole one."""
    assert card.embedding is not None
    if body.messages is not None:
        raise bad_request("This model reads no 'messages': send 'input'.", "messages")
    side = side_of(body)
    limit = late_limit(limit, late, side)
    texts, ids = _input_form(body, settings)
    if ids:
        return replace(_prepare_ids(ids, card, tokenizer, limit), side=side)
    special = body.add_special_tokens is not False
    prompt = late_prompt(body, card.embedding)
    job = Texts(tokenizer, limit, special, prompt, marker=late.marker(side))
    work = job.prepare(texts)
    filled = [fill_query(row, late) for row in work.ids] if side == "query" else work.ids
    return replace(work, ids=filled, side=side)


def _prepare_chat(
    body: EmbeddingRequest,
    card: ModelCard,
    tokenizer: Tokenizer,
    limit: Limit,
    texts: Mapping[str, str],
    prompt: str,
) -> Prepared:
    """Turns texts into ids for a model that wants them as conversations."""
    assert card.embedding is not None
    assert card.embedding.chat is not None
    limit.check_prompt(prompt, len(texts), tokenizer)
    render = partial(render_text, card.tokenizer, card.embedding.chat, prompt=prompt)
    place = next(iter(texts))
    try:
        edges = template_edges(tokenizer, render) if limit.cut else (0, 0)
        rendered = {}
        for place, text in texts.items():
            rendered[place] = render(text)
    except TemplateError as error:
        raise bad_request(f"'{place}': {error}.", place) from error
    return Texts(tokenizer, limit, bool(body.add_special_tokens), edges=edges).prepare(rendered)


def check_ids(place: str, row: Sequence[int], vocab_size: int) -> None:
    """Checks that ids are rows of the token embedding.

    Raises:
        ApiError: 400, naming the first that is not.
    """
    if min(row) < 0 or max(row) >= vocab_size:
        at = next(i for i, token in enumerate(row) if not 0 <= token < vocab_size)
        message = f"token id {str(row[at])[:24]} is not in the vocabulary (0 to {vocab_size - 1})."
        raise bad_request(f"'{place}[{at}]': {message}", f"{place}[{at}]")


def check_known(place: str, ids: Ids, vocab_size: int) -> None:
    """Refuses a text with a token that the tokenizer knows, but the model has no row for.

    Raises:
        ApiError: 400, naming the text.
    """
    if len(ids) and ids.max() >= vocab_size:
        message = f"'{place}' holds token {ids.max()}; the model knows 0 to {vocab_size - 1}."
        raise bad_request(message, place)


@dataclass(frozen=True)
class Texts:
    """How the texts of a request are tokenised.

    Attributes:
        edges: Tokens at the start and at the end of each text that no cut may take.
        marker: A token to put after the first one of each text.
    """

    tokenizer: Tokenizer
    limit: Limit
    special: bool
    prompt: str = ""
    edges: tuple[int, int] = (0, 0)
    marker: int | None = None

    def prepare(self, texts: Mapping[str, str], pools_prompt: bool = True) -> Prepared:
        """Tokenises texts, named by the place in the request where they stand."""
        for place, text in texts.items():
            self.limit.check_length(place, text, self.tokenizer)
        self.limit.check_prompt(self.prompt, len(texts), self.tokenizer)
        head = self.tokenizer.prompt_length(self.prompt, self.special) if self.prompt else 0
        self.limit.check_room(self._fixed_tokens(head))
        rows = [mark(ids, self.marker) for ids in self._encode(list(texts.values()))]
        whole = dict(zip(texts, rows, strict=True))
        kept = (max(head, self.edges[0]), self.edges[1])
        if self.marker is not None:
            kept = (max(kept[0], 1) + 1, kept[1])
        ids = [self.limit.fit(*item, self.tokenizer, *kept) for item in whole.items()]
        return _prepared(whole, ids, 0 if pools_prompt else head)

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        whole = [self.prompt + text for text in texts]
        if not self.limit.cut or max(map(len, whole)) <= GROUP_CHARS:
            return self.tokenizer.encode(whole, add_special_tokens=self.special)
        limit, special = self.limit.tokens, self.special
        return [self.tokenizer.encode_ends(t, limit, add_special_tokens=special) for t in whole]

    def _fixed_tokens(self, prompt_length: int) -> int:
        """How many tokens of each text are not of the text."""
        head, tail = len(self.tokenizer.prefix), len(self.tokenizer.suffix)
        fixed = max(head, prompt_length) + tail if self.special else prompt_length
        return max(fixed, sum(self.edges)) + (self.marker is not None)


def _prepared(whole: Mapping[str, Ids], ids: list[Ids], pool_from: int = 0) -> Prepared:
    for place, row in zip(whole, ids, strict=True):
        if len(row) <= pool_from:
            raise bad_request(f"'{place}' has no tokens.", place)
    truncated = sum(map(len, whole.values())) - sum(map(len, ids))
    return Prepared(ids, pool_from, truncated)


def _input_form(
    body: EmbeddingRequest, settings: GatewaySettings
) -> tuple[dict[str, str], dict[str, Sequence[int]]]:
    """The input as texts or as rows of token ids, each under its place; one of them is empty."""
    if isinstance(body.input, str):
        return {"input": body.input}, {}
    items: Sequence[Any] = body.input or ()
    if not items:
        raise bad_request("'input' is an empty list.", "input")
    kind = type(items[0])
    for i, item in enumerate(items):
        if type(item) is not kind:
            message = "'input' mixes texts, token ids and lists of token ids."
            raise bad_request(message, f"input[{i}]")
    if kind is int:
        return {}, {"input": items}
    if len(items) > settings.max_inputs:
        message = f"'input' has {len(items)} items; at most {settings.max_inputs} a request."
        raise bad_request(message, "input")
    named = {f"input[{i}]": item for i, item in enumerate(items)}
    return (named, {}) if kind is str else ({}, named)


def _id_row(place: str, row: Sequence[int], vocab_size: int) -> Ids:
    if not row:
        raise bad_request(f"'{place}' is an empty list of token ids.", place)
    check_ids(place, row, vocab_size)
    return np.array(row, np.int32)


def _check_dimensions(dimensions: int, card: EmbeddingCard, strict: bool) -> None:
    if dimensions > card.dimensions:
        message = f"'dimensions' is {str(dimensions)[:24]}; possible: 1 to {card.dimensions}."
        raise bad_request(message, "dimensions")
    trained = sorted({*card.matryoshka, card.dimensions})
    if strict and dimensions not in trained:
        widths = ", ".join(map(str, trained))
        message = f"'dimensions' is {dimensions}; the model was trained for: {widths}."
        raise bad_request(message, "dimensions")


_IMPLIED_DTYPES: dict[str, tuple[OutputDtype, ...]] = {
    "base64_int8": ("int8", "uint8"),
    "base64_binary": ("binary", "ubinary"),
}


def _output_dtype(body: EmbeddingRequest) -> OutputDtype:
    fit = _IMPLIED_DTYPES.get(body.encoding_format or "float")
    if fit is None:
        return body.output_dtype or "float32"
    if body.output_dtype not in (None, *fit):
        raise _contradiction(body)
    return body.output_dtype or fit[0]


def _contradiction(body: EmbeddingRequest) -> ApiError:
    message = f"'output_dtype' {body.output_dtype} contradicts {body.encoding_format}."
    return bad_request(message, "output_dtype")
