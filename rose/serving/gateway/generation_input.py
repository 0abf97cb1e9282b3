"""From a chat or completion request to the choices that the engine is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from rose.models.card import ModelCard
from rose.runtime.options import SamplingParams
from rose.serving.gateway.choice import Choice
from rose.serving.gateway.conversation import render_turns, turns_of
from rose.serving.gateway.detokenization import TokenTable
from rose.serving.gateway.embedding_input import check_ids, check_known
from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.generation_schemas import (
    ChatRequest,
    CompletionRequest,
)
from rose.serving.gateway.sampling_fields import (
    TextRules,
    for_choice,
    grammar_of,
    max_tokens_of,
    refuse,
    sampling_of,
    text_rules,
)
from rose.serving.gateway.tokenization import Ids, Tokenizer
from rose.serving.gateway.tools import forced_call

COMPLETION_TOKENS = 16
MAX_LISTED = 1_000_000  # entries of a field in all choices of a request

# What the engine calls the grammar, and what bans tokens.
GRAMMAR, BIAS = "response_format", "logit_bias"

_NO_CHAT = ("functions", "audio", "web_search_options", "chat_template", "echo")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        ids: int32 [tokens].
        text: As the request has it; None if that has ids.
        added: Leading special tokens that the tokenizer put before the text.
    """

    ids: Ids
    text: str | None = None
    added: int = 0


@dataclass(frozen=True)
class Plan:
    """What a request asks for.

    Attributes:
        choices: Those of the first prompt first; each prompt has `n`.
        blamed: What the request calls a field that the engine refuses, where it has another name.
    """

    prompts: list[Prompt]
    choices: list[Choice]
    n: int
    blamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is asked for every prompt of a request."""

    sampling: SamplingParams
    rules: TextRules
    max_tokens: int | None
    n: int
    blamed: Mapping[str, str]


def plan_chat(body: ChatRequest, card: ModelCard, tokenizer: Tokenizer) -> Plan:
    """Checks a request, renders and tokenises it. CPU work: call it off the event loop.

    Raises:
        ApiError: 400, it is malformed or too long.
    """
    wish = _chat_wish(body, card)
    turns, limit = turns_of(body, card), context_limit(card)
    for i, turn in enumerate(turns):
        _check_length(f"messages[{i}]", turn["content"], limit, tokenizer)
    text = render_turns(body, turns, card)
    special = bool(body.add_special_tokens)
    return _plan(_tokenized({"messages": text}, special, card, tokenizer), wish, card, tokenizer)


def plan_completion(
    body: CompletionRequest, card: ModelCard, tokenizer: Tokenizer, max_choices: int
) -> Plan:
    """Checks a request and tokenises its prompts. CPU work: call it off the event loop.

    Raises:
        ApiError: 400, it is malformed, or a prompt is empty or too long.
    """
    wish = _completion_wish(body, card)
    texts, rows = _prompt_form(body)
    count = max(len(texts), len(rows))
    if count * wish.n > max_choices:
        message = f"'prompt' asks for {count} x {wish.n} choices; at most {max_choices} a request."
        raise bad_request(message, "prompt")
    if rows:
        prompts = {place: _id_prompt(place, row, card) for place, row in rows.items()}
    else:
        special = body.add_special_tokens is not False
        prompts = _tokenized(texts, special, card, tokenizer)
    return _plan(prompts, wish, card, tokenizer)


def context_limit(card: ModelCard) -> int:
    """The most tokens, prompt and output, of one sequence."""
    assert card.generation is not None
    pages = card.generation.max_kv_tokens  # 0: not known
    return min(card.max_model_len, pages) if pages else card.max_model_len


@lru_cache(maxsize=16)
def table_of(tokenizer: Tokenizer) -> TokenTable:
    """The table that turns a tokenizer's ids into text; one for all requests."""
    return TokenTable(tokenizer.backend)


def _chat_wish(body: ChatRequest, card: ModelCard) -> _Wish:
    """Checks a chat request and reads how its answers are to be made.

    Raises:
        ApiError: 400, naming the field.
    """
    refuse(body, _NO_CHAT)
    if body.function_call not in (None, "none"):
        raise bad_request("'function_call' is not supported: use 'tool_choice'.", "function_call")
    if body.modalities and body.modalities != ["text"]:
        raise bad_request("'modalities': only text is supported.", "modalities")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    call = forced_call(body, card)
    top = (body.top_logprobs or 0) if body.logprobs else None
    wish = _wish(body, card, max_tokens_of(body, None, 1), logprobs=top)
    if call is None:
        return wish
    sampling = msgspec.structs.replace(wish.sampling, grammar=call.schema)
    return replace(wish, sampling=sampling, blamed={**wish.blamed, GRAMMAR: call.field})


def _completion_wish(body: CompletionRequest, card: ModelCard) -> _Wish:
    """Checks a completion request and reads how its continuations are to be made.

    Raises:
        ApiError: 400, naming the field.
    """
    refuse(body, ("suffix", "tools"))
    if body.tool_choice not in (None, "none", "auto"):
        raise bad_request("'tool_choice' is for chat completions.", "tool_choice")
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"'best_of' is {str(body.best_of)[:24]}; only the same as 'n' is supported."
        raise bad_request(message, "best_of")
    max_tokens = max_tokens_of(body, COMPLETION_TOKENS, 0 if body.echo else 1)
    wish = _wish(body, card, max_tokens, logprobs=body.logprobs)
    wish = replace(wish, rules=replace(wish.rules, goes_on=True))
    if not body.echo:
        return wish
    sampling = msgspec.structs.replace(wish.sampling, prompt_logprobs=body.logprobs)
    return replace(wish, sampling=sampling)


def _wish(
    body: ChatRequest | CompletionRequest,
    card: ModelCard,
    max_tokens: int | None,
    logprobs: int | None,
) -> _Wish:
    assert card.generation is not None
    sampling = msgspec.structs.replace(
        sampling_of(body, card),
        grammar=grammar_of(body.response_format, card.generation),
        logprobs=logprobs,
    )
    rules, blamed = text_rules(body, card.generation), {BIAS: _banning(body, sampling)}
    return _Wish(sampling, rules, max_tokens, body.n or 1, blamed)


def _banning(body: ChatRequest | CompletionRequest, sampling: SamplingParams) -> str:
    """The field to name where every token is banned: one that was sent, if there is one.

    Else it is one whose default is the checkpoint's: what a request sends takes its place.
    """
    sent = (body.logit_bias, body.min_tokens)
    for bias, least in (sent, (sampling.logit_bias, sampling.min_tokens)):
        if bias or least:
            return "logit_bias" if bias else "min_tokens"
    return BIAS


def _plan(
    prompts: Mapping[str, Prompt], wish: _Wish, card: ModelCard, tokenizer: Tokenizer
) -> Plan:
    limit, table = context_limit(card), table_of(tokenizer)
    _check_lists(wish, len(prompts) * wish.n)
    choices: list[Choice] = []
    for place, prompt in prompts.items():
        room = _room(place, str(len(prompt.ids)), len(prompt.ids), wish, limit)
        for number in range(wish.n):
            sampling = for_choice(wish.sampling, wish.max_tokens, room, number)
            choices.append(Choice(len(choices), prompt.ids, sampling, wish.rules, table))
    return Plan(list(prompts.values()), choices, wish.n, wish.blamed)


def _check_lists(wish: _Wish, choices: int) -> None:
    """Refuses what a small request could fill the memory with: each choice has lists of its own."""
    lists = {
        BIAS: len(wish.sampling.logit_bias),
        "stop_token_ids": len(wish.sampling.stop_token_ids),
    }
    for name, size in lists.items():
        if size * choices > MAX_LISTED and choices > 1:
            what = f"'{name}' of {size} entries for {choices} choices"
            raise bad_request(f"{what} makes more than {MAX_LISTED}.", name)


def _tokenized(
    texts: Mapping[str, str], special: bool, card: ModelCard, tokenizer: Tokenizer
) -> dict[str, Prompt]:
    limit = context_limit(card)
    for place, text in texts.items():
        _check_length(place, text, limit, tokenizer)
    rows = tokenizer.encode(list(texts.values()), add_special_tokens=special)
    for place, row in zip(texts, rows, strict=True):
        if not len(row):
            raise bad_request(f"'{place}' is empty: there is nothing to go on from.", place)
        check_known(place, row, card.vocab_size)
    added = len(tokenizer.prefix) if special else 0
    return {
        place: Prompt(row, text, added)
        for (place, text), row in zip(texts.items(), rows, strict=True)
    }


def _check_length(place: str, text: str, limit: int, tokenizer: Tokenizer) -> None:
    """Refuses a text that is far too long before much work is done on it."""
    if tokenizer.certainly_longer(text, limit):
        raise _too_long(place, f"more than {2 * limit}", 1, limit)


def _room(place: str, found: str, tokens: int, wish: _Wish, limit: int) -> int:
    """How many tokens fit behind a prompt."""
    needed = 0 if wish.max_tokens == 0 else 1
    if tokens + needed > limit:
        raise _too_long(place, found, needed, limit)
    return limit - tokens


def _too_long(place: str, found: str, needed: int, limit: int) -> ApiError:
    message = (
        f"'{place}' has {found} tokens; with at least {needed} of output it is more than the "
        f"limit of {limit}."
    )
    return bad_request(message, place, "context_length_exceeded")


def _prompt_form(
    body: CompletionRequest,
) -> tuple[dict[str, str], dict[str, Sequence[int]]]:
    """The prompts as texts or as rows of ids, each under its place; one of them is empty."""
    if body.prompt is None:
        raise bad_request("'prompt' is missing.", "prompt")
    if isinstance(body.prompt, str):
        return {"prompt": body.prompt}, {}
    items: Sequence[Any] = body.prompt
    if not items:
        raise bad_request("'prompt' is an empty list.", "prompt")
    kind = type(items[0])
    for i, item in enumerate(items):
        if type(item) is not kind:
            message = "'prompt' mixes texts, token ids and lists of token ids."
            raise bad_request(message, f"prompt[{i}]")
    if kind is int:
        return {}, {"prompt": items}
    named = {f"prompt[{i}]": item for i, item in enumerate(items)}
    return (named, {}) if kind is str else ({}, named)


def _id_prompt(place: str, row: Sequence[int], card: ModelCard) -> Prompt:
    if not row:
        raise bad_request(f"'{place}' is an empty list of token ids.", place)
    check_ids(place, row, card.vocab_size)
    return Prompt(np.array(row, np.int32))
