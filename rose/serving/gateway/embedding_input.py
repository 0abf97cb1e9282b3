"""From an embedding request to token ids: input forms, prompts, truncation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rose.models.card import EmbeddingCard, ModelCard
from rose.runtime.options import EmbedOptions, OutputDtype
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.schemas import ChatMessage, EmbeddingRequest
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.templates import TemplateError, render
from rose.serving.gateway.tokenization import Ids, Side, Tokenizer

# What `input_type` values of the field's APIs stand for: names of prompts, the first that a model
# has. They are those that sentence-transformers' encode_query and encode_document look for.
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
_ROLES = {
    "query": _QUERY,
    "search_query": ("search_query", *_QUERY),
    "document": _DOCUMENT,
    "passage": ("passage", "document", "corpus"),
    "search_document": ("search_document", *_DOCUMENT),
}


@dataclass(frozen=True)
class Limit:
    """How long a text may be, and what happens to one that is longer."""

    tokens: int
    cut: bool
    side: Side


@dataclass(frozen=True)
class Prepared:
    """What the engine is asked, and what the answer reports.

    Attributes:
        ids: int32 [tokens] of each text.
        pool_from: Leading tokens of each text that pooling leaves out.
        truncated: Tokens that were cut off, over all texts.
    """

    ids: list[Ids]
    pool_from: int
    truncated: int


def check_supported(body: EmbeddingRequest) -> None:
    """Refuses fields that change the answer and are not supported.

    Raises:
        ApiError: 400.
    """
    for name in ("chat_template", "late_chunking", "return_multivector", "embedding_types"):
        if getattr(body, name):
            raise bad_request(f"'{name}' is not supported.", name)
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


def prepare(
    body: EmbeddingRequest, card: ModelCard, tokenizer: Tokenizer, settings: GatewaySettings
) -> Prepared:
    """Turns the request's texts into ids. CPU work: call it off the event loop.

    Raises:
        ApiError: 400, naming the text at fault.
    """
    assert card.embedding is not None
    limit = _limit(body, card, settings)
    if body.messages is not None:
        text = _conversation(body, body.messages, card)
        special = bool(body.add_special_tokens)
        return _tokenize([text], "messages", tokenizer, limit, special, "")
    assert body.input is not None
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        raise bad_request("'input' is an empty list.", "input")
    if all(isinstance(text, str) for text in texts):
        _check_count(len(texts), settings)
        prompt = _prompt(body, card.embedding)
        special = body.add_special_tokens is not False
        return _tokenize(texts, "input", tokenizer, limit, special, prompt, card.embedding)
    return _check_ids(body, texts, card, tokenizer, limit, settings)


def _check_dimensions(dimensions: int, card: EmbeddingCard, strict: bool) -> None:
    if dimensions > card.dimensions:
        message = f"'dimensions' is {dimensions}; the model's vectors have {card.dimensions}."
        raise bad_request(message, "dimensions")
    if strict and dimensions not in (card.dimensions, *card.matryoshka):
        widths = ", ".join(map(str, sorted({*card.matryoshka, card.dimensions})))
        message = f"'dimensions' is {dimensions}; the model was trained for: {widths}."
        raise bad_request(message, "dimensions")


def _output_dtype(body: EmbeddingRequest) -> OutputDtype:
    implied: dict[str, tuple[OutputDtype, ...]] = {
        "base64_int8": ("int8", "uint8"),
        "base64_binary": ("binary", "ubinary"),
    }
    fit = implied.get(body.encoding_format or "float")
    if fit is None:
        return body.output_dtype or "float32"
    if body.output_dtype is None:
        return fit[0]
    if body.output_dtype not in fit:
        message = f"'output_dtype' {body.output_dtype} contradicts {body.encoding_format}."
        raise bad_request(message, "output_dtype")
    return body.output_dtype


def _limit(body: EmbeddingRequest, card: ModelCard, settings: GatewaySettings) -> Limit:
    tokens, wanted = card.max_model_len, body.truncate_prompt_tokens
    cut = settings.truncate if body.truncate is None else body.truncate not in (False, "NONE")
    if wanted is not None:
        if body.truncate in (False, "NONE"):
            message = "'truncate_prompt_tokens' contradicts 'truncate'."
            raise bad_request(message, "truncate_prompt_tokens")
        if wanted == 0 or wanted > tokens:
            message = f"'truncate_prompt_tokens' is {wanted}; possible: 1 to {tokens}, or -1."
            raise bad_request(message, "truncate_prompt_tokens")
        tokens, cut = (tokens if wanted == -1 else wanted), True
    side: Side = "left" if body.truncate == "START" else "right"
    return Limit(tokens, cut, body.truncation_side or side)


def _prompt(body: EmbeddingRequest, card: EmbeddingCard) -> str:
    """The text that goes before each text."""
    given = [name for name in ("prompt", "prompt_name", "input_type") if getattr(body, name)]
    if body.prompt is not None and len(given) > 1:
        raise bad_request("Give one of 'prompt', 'prompt_name' and 'input_type'.", given[-1])
    if body.prompt is not None:
        return body.prompt
    if body.prompt_name is not None:
        if body.input_type is not None and body.input_type != body.prompt_name:
            raise bad_request("Give 'prompt_name' or 'input_type', not both.", "input_type")
        if body.prompt_name not in card.prompts:
            raise _unknown_prompt("prompt_name", body.prompt_name, card)
        return card.prompts[body.prompt_name]
    name = card.default_prompt_name
    if body.input_type is not None:
        name = _prompt_of_type(body.input_type, card) or name
    return card.prompts.get(name, "") if name is not None else ""


def _prompt_of_type(kind: str, card: EmbeddingCard) -> str | None:
    """The prompt's name for an `input_type`; a role that the model has no prompt for has none."""
    for name in (kind, *_ROLES.get(kind, ())):
        if name in card.prompts:
            return name
    if kind in _ROLES:
        return None
    raise _unknown_prompt("input_type", kind, card)


def _unknown_prompt(field: str, name: str, card: EmbeddingCard) -> Exception:
    known = ", ".join(f"'{known}'" for known in sorted(card.prompts)) or "none"
    message = f"'{field}' is '{name[:100]}'; prompts of this model: {known}."
    return bad_request(message, field)


def _conversation(body: EmbeddingRequest, messages: list[ChatMessage], card: ModelCard) -> str:
    if body.prompt or body.prompt_name or body.input_type:
        message = "'prompt', 'prompt_name' and 'input_type' go with 'input', not 'messages'."
        raise bad_request(message, "messages")
    if not messages:
        raise bad_request("'messages' is an empty list.", "messages")
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    variables: dict[str, Any] = body.chat_template_kwargs or {}
    if clash := variables.keys() & {"messages", "template", "card", "add_generation_prompt"}:
        message = f"'chat_template_kwargs' cannot set '{min(clash)}'."
        raise bad_request(message, "chat_template_kwargs")
    start_answer = bool(body.add_generation_prompt)
    try:
        return render(card.tokenizer, turns, add_generation_prompt=start_answer, **variables)
    except TemplateError as error:
        raise bad_request(f"{str(error)[:1].upper()}{str(error)[1:]}.", "messages") from error


def _turn(message: ChatMessage, where: str) -> dict[str, str]:
    content = message.content if isinstance(message.content, str) else ""
    if isinstance(message.content, list):
        for i, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                text = f"'{where}.content[{i}]' is not text; only text is supported."
                raise bad_request(text, f"{where}.content[{i}]")
        content = "".join(part.text or "" for part in message.content)
    named = {"name": message.name} if message.name is not None else {}
    return {"role": message.role, "content": content, **named}


def _check_count(count: int, settings: GatewaySettings) -> None:
    if count > settings.max_inputs:
        message = f"'input' has {count} items; at most {settings.max_inputs} a request."
        raise bad_request(message, "input")


def _tokenize(
    texts: Sequence[Any],
    name: str,
    tokenizer: Tokenizer,
    limit: Limit,
    special: bool,
    prompt: str,
    card: EmbeddingCard | None = None,
) -> Prepared:
    prompt_length = tokenizer.prompt_length(prompt) if prompt else 0
    where = [name if len(texts) == 1 else f"{name}[{i}]" for i in range(len(texts))]
    if not limit.cut:
        for place, text in zip(where, texts, strict=True):
            if tokenizer.certainly_longer(text, limit.tokens):
                raise _too_long(place, f"more than {2 * limit.tokens}", limit.tokens)
    whole = tokenizer.encode([prompt + text for text in texts], add_special_tokens=special)
    _check_room(tokenizer, limit, special, prompt_length)
    ids = [_fit(*item, tokenizer, limit, prompt_length) for item in zip(whole, where, strict=True)]
    pool_from = prompt_length if card is not None and not card.pools_prompt else 0
    for place, row in zip(where, ids, strict=True):
        if len(row) <= pool_from:
            raise bad_request(f"'{place}' has no tokens to embed.", place)
    truncated = sum(map(len, whole)) - sum(map(len, ids))
    return Prepared(ids, pool_from, truncated)


def _check_room(tokenizer: Tokenizer, limit: Limit, special: bool, prompt_length: int) -> None:
    """Refuses a limit that leaves no room for text beside the special tokens and the prompt."""
    fixed = len(tokenizer.prefix) + len(tokenizer.suffix) if special else 0
    fixed = max(fixed, prompt_length + len(tokenizer.suffix)) if prompt_length else fixed
    if limit.cut and limit.tokens <= fixed:
        message = (
            f"Texts cannot be cut to {limit.tokens} tokens: "
            f"special tokens and the prompt take {fixed}."
        )
        raise bad_request(message, "truncate_prompt_tokens")


def _fit(ids: Ids, place: str, tokenizer: Tokenizer, limit: Limit, keep: int) -> Ids:
    if len(ids) <= limit.tokens:
        return ids
    if not limit.cut:
        raise _too_long(place, str(len(ids)), limit.tokens)
    return tokenizer.cut(ids, limit.tokens, limit.side, keep)


def _too_long(place: str, tokens: str, limit: int) -> Exception:
    message = (
        f"'{place}' has {tokens} tokens; the model takes at most {limit}. "
        f'Shorten it, or send "truncate": true.'
    )
    return bad_request(message, place, "context_length_exceeded")


def _check_ids(
    body: EmbeddingRequest,
    items: Sequence[str | int | list[int]],
    card: ModelCard,
    tokenizer: Tokenizer,
    limit: Limit,
    settings: GatewaySettings,
) -> Prepared:
    if body.prompt or body.prompt_name or body.input_type:
        message = "'prompt', 'prompt_name' and 'input_type' go with texts, not with token ids."
        raise bad_request(message, "input")
    kinds = [type(item) for item in items]
    for i, kind in enumerate(kinds):
        if kind is not kinds[0]:
            message = "'input' mixes texts, token ids and lists of token ids."
            raise bad_request(message, f"input[{i}]")
    if kinds[0] is int:
        rows: dict[str, Sequence[Any]] = {"input": items}
    else:
        _check_count(len(items), settings)
        rows = {f"input[{i}]": item for i, item in enumerate(items) if isinstance(item, list)}
    whole = [_id_row(place, row, card.vocab_size) for place, row in rows.items()]
    ids = [_fit(*item, tokenizer, limit, 0) for item in zip(whole, rows, strict=True)]
    return Prepared(ids, 0, sum(map(len, whole)) - sum(map(len, ids)))


def _id_row(place: str, row: Sequence[int], vocab_size: int) -> Ids:
    if not row:
        raise bad_request(f"'{place}' is an empty list of token ids.", place)
    if min(row) < 0 or max(row) >= vocab_size:
        at = next(i for i, token in enumerate(row) if not 0 <= token < vocab_size)
        message = f"Token id {str(row[at])[:24]} is not in the vocabulary (0 to {vocab_size - 1})."
        raise bad_request(f"'{place}[{at}]': {message}", f"{place}[{at}]")
    return np.array(row, np.int32)
