"""Texts of a late-interaction model: a query or a document each, with what marks it."""

from dataclasses import replace

import msgspec
import numpy as np

from rose.models.card import EmbeddingCard, LateInteraction, Side
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.prompts import choose_prompt, role_of
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.tokenization import Ids
from rose.serving.gateway.truncation import Limit


def side_of(body: EmbeddingRequest) -> Side:
    """Whether the texts of a request are queries or documents.

    Raises:
        ApiError: 400, it does not say so, or says both.
    """
    side, named = role_of(body.input_type), role_of(body.prompt_name)
    if side and named and side != named:
        message = f"'prompt_name' is for {named} texts, and these are {side} texts."
        raise bad_request(message, "prompt_name")
    if found := side or named:
        return found
    message = (
        "This model reads queries and documents in different ways: 'input_type' has to be 'query' "
        "or 'document' (or 'prompt_name', where there is no such field)."
    )
    raise bad_request(message, "input_type")


def late_prompt(body: EmbeddingRequest, card: EmbeddingCard) -> str:
    """The text that goes before each text: what the request says, else that of its side.

    Raises:
        ApiError: 400, the model has no such prompt, or fields contradict each other.
    """
    if body.prompt is not None or (body.prompt_name is not None and body.input_type is not None):
        return choose_prompt(msgspec.structs.replace(body, input_type=None), card)
    if body.prompt_name is not None and body.prompt_name not in card.prompts:
        # It says which side the texts are of, which needs no prompt.
        body = msgspec.structs.replace(body, input_type=body.prompt_name, prompt_name=None)
    return choose_prompt(body, card)


def late_limit(limit: Limit, late: LateInteraction, side: Side) -> Limit:
    """The rule for texts of a side, whose length the checkpoint may bound."""
    return replace(limit, tokens=min(limit.tokens, late.length(side)))


def mark(ids: Ids, marker: int | None) -> Ids:
    """A text's ids with a marker after the first."""
    if marker is None:
        return ids
    return np.concatenate([ids[:1], np.array([marker], np.int32), ids[1:]])


def fill_query(ids: Ids, late: LateInteraction) -> Ids:
    """A query's ids, filled up as the checkpoint was trained."""
    expansion = late.expansion
    if expansion is None or len(ids) >= expansion.length:
        return ids
    missing = expansion.length - len(ids)
    return np.concatenate([ids, np.full(missing, expansion.token, np.int32)])
