"""Bodies of /tokenize and /detokenize."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rose.serving.gateway.generation_schemas import ConversationMessage
from rose.serving.gateway.schemas import Request


class TokenizeRequest(Request, kw_only=True):
    """A text or a conversation to tokenise."""

    prompt: Annotated[str | None, Meta(description="The text.", examples=["a red kite"])] = None
    text: Annotated[str | None, Meta(description="The same by another name.")] = None
    inputs: Annotated[
        str | list[str] | None,
        Meta(description="A text or several, for an answer in the form of TEI: places of tokens."),
    ] = None
    messages: Annotated[
        list[ConversationMessage] | None,
        Meta(description="A conversation, whose prompt for the model's answer is tokenised."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="With `messages`: end with the start of an answer (default).")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="With `messages`: end within the last one.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="With `messages`: variables for the template.")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="With `messages`: functions to offer.")
    ] = None
    prompt_name: Annotated[
        str | None, Meta(description="With `inputs`: put this prompt of the model before each.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Default true for texts, false for messages.")
    ] = None
    return_token_strs: Annotated[
        bool | None, Meta(description="Also give the vocabulary's entries.")
    ] = None


class TokenizeAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Token ids of a text."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(Request, kw_only=True):
    """Token ids to turn into text."""

    tokens: Annotated[
        list[int] | None, Meta(description="Token ids.", examples=[[101, 2417, 20497, 102]])
    ] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Default false.")] = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text, under both names that clients look for."""

    prompt: str
    text: str
