"""From the fields of a request to what the engine and the text of a choice are asked."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from rose.models.card import GenerationCard, ModelCard
from rose.runtime.options import SamplingParams
from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.generation_schemas import (
    GenerationRequest,
    ResponseFormat,
)
from rose.serving.gateway.unsupported_fields import INSTEAD, UNSUPPORTED, asks

ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the tokens of a choice become its text.

    Attributes:
        stops: Texts that end it.
        include_stop: Whether what ended it stays in the text.
        skip_special: Whether special tokens are left out.
        min_tokens: So many tokens are not searched for stops.
        goes_on: Whether it goes on from the prompt's text, and does not begin a text of its own.
            The decoders of some tokenizers drop a blank at the beginning of a text.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    goes_on: bool = False


def refuse(body: GenerationRequest, names: Iterable[str] = ()) -> None:
    """Refuses what changes the answer and is not supported.

    Raises:
        ApiError: 400.
    """
    for name in (*UNSUPPORTED, *names):
        if asks(name, getattr(body, name)):
            hint = f": use '{INSTEAD[name]}'" if name in INSTEAD else ""
            raise bad_request(f"'{name}' is not supported{hint}.", name)


def sampling_of(body: GenerationRequest, card: ModelCard) -> SamplingParams:
    """How tokens are chosen: request, else the checkpoint's defaults, else neutral.

    Seed and `max_tokens` are those of a request with one prompt and one choice; see `for_choice`.

    Raises:
        ApiError: 400, a field is out of range.
    """
    facts = card.generation
    assert facts is not None
    _check_ids(body, card.vocab_size)
    return SamplingParams(
        min_tokens=min_tokens_of(body, facts),
        temperature=_first(body.temperature, facts.temperature, 1.0),
        top_k=min(max(0, int(_first(body.top_k, facts.top_k, 0))), card.vocab_size),
        top_p=_first(body.top_p, facts.top_p, 1.0),
        min_p=_first(body.min_p, facts.min_p, 0.0),
        repetition_penalty=_first(body.repetition_penalty, facts.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={**facts.logit_bias, **(body.logit_bias or {})},
        seed=body.seed,
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        ignore_eos=bool(body.ignore_eos),
        cache_salt=body.cache_salt or "",
    )


def min_tokens_of(body: GenerationRequest, facts: GenerationCard) -> int:
    """The least tokens to generate: request, else the checkpoint's default."""
    return facts.min_tokens if body.min_tokens is None else body.min_tokens


def text_rules(body: GenerationRequest, facts: GenerationCard) -> TextRules:
    """How tokens become text."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return TextRules(
        stops=tuple(dict.fromkeys(stops)),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        min_tokens=min_tokens_of(body, facts),
    )


def max_tokens_of(body: GenerationRequest, default: int | None, least: int) -> int | None:
    """The most tokens to generate as the request has it, None: as many as fit.

    Args:
        default: Where the request says nothing.
        least: The smallest that is possible.

    Raises:
        ApiError: 400, it is too small, or fields contradict each other.
    """
    old, new = body.max_tokens, body.max_completion_tokens
    name = "max_tokens" if new is None else "max_completion_tokens"
    if None not in (old, new) and old != new:
        message = f"'max_tokens' is {old} and '{name}' is {new}; send one of them."
        raise bad_request(message, name)
    value = old if new is None else new
    if value is not None and value < least:
        raise bad_request(f"'{name}' is {value}; at least {least} is possible.", name)
    value = default if value is None else value
    if value is not None and (body.min_tokens or 0) > value:
        message = f"'min_tokens' is {str(body.min_tokens)[:24]}, more than the {value} of '{name}'."
        raise bad_request(message, "min_tokens")
    return value


def for_choice(
    sampling: SamplingParams, max_tokens: int | None, room: int, number: int
) -> SamplingParams:
    """The parameters of one choice of a prompt.

    Args:
        sampling: Those of the request.
        max_tokens: As the request has it.
        room: Tokens that fit behind the prompt; what is more is cut.
        number: Which of the choices of its prompt it is.
    """
    most = room if max_tokens is None else min(max_tokens, room)
    seed = sampling.seed
    if seed is not None:  # stays a 64-bit number
        seed = (seed + number + (1 << 63)) % (1 << 64) - (1 << 63)
    least = min(sampling.min_tokens, most)
    return msgspec.structs.replace(sampling, max_tokens=most, min_tokens=least, seed=seed)


def grammar_of(form: ResponseFormat | None, facts: GenerationCard) -> str | None:
    """The JSON schema that the output follows, as text; None: it is free.

    Raises:
        ApiError: 400.
    """
    if form is None or form.type == "text":
        return None
    if not facts.structured_output:
        message = f"'response_format': this model does not offer '{form.type}'."
        raise bad_request(message, "response_format")
    if form.type == "json_object":
        if form.schema not in (None, True, {}):
            field = "response_format.schema"
            raise bad_request(f"'{field}' goes with the type 'json_schema' alone.", field)
        return ANY_OBJECT
    if form.json_schema is None or form.json_schema.schema is None:
        field = "response_format.json_schema.schema"
        raise bad_request(f"'{field}' is missing.", field)
    return json.dumps(form.json_schema.schema, ensure_ascii=False)


def _first(wanted: float | None, checkpoint: float | None, neutral: float) -> float:
    if wanted is not None:
        return wanted
    return neutral if checkpoint is None else checkpoint


def _check_ids(body: GenerationRequest, vocab_size: int) -> None:
    for i, token in enumerate(body.stop_token_ids or ()):
        if not 0 <= token < vocab_size:
            raise _unknown_id(f"stop_token_ids[{i}]", token, vocab_size)
    for token in body.logit_bias or ():
        if not 0 <= token < vocab_size:
            raise _unknown_id("logit_bias", token, vocab_size)


def _unknown_id(place: str, token: int, vocab_size: int) -> ApiError:
    message = f"token id {str(token)[:24]} is not in the vocabulary (0 to {vocab_size - 1})."
    return bad_request(f"'{place}': {message}", place)
