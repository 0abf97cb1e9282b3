"""Bodies of chat completions and completions. What stands here is what /openapi.json says."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from rose.runtime.options import Priority
from rose.serving.gateway.schemas import ChatMessage
from rose.serving.gateway.unsupported_fields import UnsupportedFields

FinishReason = Literal["stop", "length", "tool_calls"]

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SALT_CHARS = 1000
# Logits are divided or multiplied by it, and have to stay finite.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100

_INT64 = 1 << 63
_Count = Annotated[int, Meta(ge=0)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_NotSupported = Annotated[Any, Meta(description="Not supported.")]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream; without `stream` they are ignored."""

    include_usage: Annotated[
        bool | None, Meta(description="Send a last chunk with the usage and no choices.")
    ] = None


class GenerationRequest(UnsupportedFields, kw_only=True):
    """How text is generated: fields of chat completions and of completions."""

    max_tokens: Annotated[
        _Count | None,
        Meta(description="Most tokens to generate; what does not fit into the context is cut."),
    ] = None
    max_completion_tokens: Annotated[
        _Count | None, Meta(description="The same by its newer name.")
    ] = None
    min_tokens: Annotated[
        _Count | None, Meta(description="Neither end tokens nor stop strings count before these.")
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="0 takes the most likely token.")
    ] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="1 is off.")] = (
        None
    )
    top_k: Annotated[Annotated[int, Meta(ge=-1)] | None, Meta(description="-1 and 0 are off.")] = (
        None
    )
    min_p: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="0 is off.")] = (
        None
    )
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None,
        Meta(description="1 is off."),
    ] = None
    logit_bias: Annotated[
        dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None,
        Meta(description="Added to the logits of tokens, by id; -100 bans a token."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None,
        Meta(description="The same seed gives the same text; choice i of n has seed + i."),
    ] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None, Meta(description="Choices a prompt.")
    ] = None
    stop: Annotated[
        _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None,
        Meta(description="Text that ends a choice; it is not part of it."),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, Meta(description="Tokens that end a choice, beside the model's own.")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Meta(description="Keep the stop string, or the text of the end token.")
    ] = None
    ignore_eos: Annotated[
        bool | None, Meta(description="Go on past the model's own end tokens.")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, Meta(description="Leave special tokens out of the text; default true.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Default true for prompts, false for messages.")
    ] = None
    stream: Annotated[bool | None, Meta(description="Send chunks as server-sent events.")] = None
    stream_options: StreamOptions | None = None
    priority: Annotated[
        Priority | None, Meta(description="`bulk` lets online requests pass first.")
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None,
        Meta(description="Cached prefixes are shared by requests of the same salt only."),
    ] = None


class FunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model calls."""

    name: str
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="JSON of an object, or the object.")
    ] = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call in an earlier answer of the model."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class ConversationMessage(ChatMessage, kw_only=True):
    """One message of a conversation with an LLM."""

    tool_calls: Annotated[
        list[ToolCall] | None, Meta(description="Of role `assistant`: the calls it made.")
    ] = None
    tool_call_id: Annotated[
        str | None, Meta(description="Of role `tool`: the call that this answers.")
    ] = None
    reasoning_content: str | None = None
    function_call: _NotSupported = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """The schema of an answer; it is always followed strictly."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What an answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: _NotSupported = None


class ChatRequest(GenerationRequest, kw_only=True):
    """A conversation to go on with."""

    messages: list[ConversationMessage] | None = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="Functions that the model may call.")
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | dict[str, Any] | None,
        Meta(
            description="`auto` (default); `none` hides the tools from the model; `required` or "
            '`{"type": "function", "function": {"name": ...}}` makes it call one.'
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="false keeps the first call of an answer only.")
    ] = None
    response_format: ResponseFormat | None = None
    logprobs: Annotated[
        bool | None, Meta(description="Give the log-probability of each token.")
    ] = None
    top_logprobs: Annotated[
        _TopLogprobs | None, Meta(description="With `logprobs`: that many likely tokens too.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="End with the start of an answer; default true.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Go on with the last message instead of answering it.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Variables for the chat template.")
    ] = None
    reasoning_effort: Annotated[
        str | None, Meta(description="A variable for the chat template.")
    ] = None
    documents: Annotated[
        list[dict[str, Any]] | None, Meta(description="A variable for the chat template.")
    ] = None
    modalities: Annotated[list[str] | None, Meta(description="Only `text` is supported.")] = None
    function_call: _NotSupported = None
    functions: _NotSupported = None
    audio: _NotSupported = None
    web_search_options: _NotSupported = None
    chat_template: _NotSupported = None
    echo: _NotSupported = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Prompts to continue."""

    prompt: Annotated[
        str | list[str | int | list[int]] | None,
        Meta(
            description="A text, a list of texts, one prompt's token ids, or a list of such lists.",
            examples=["The sky is"],
        ),
    ] = None
    echo: Annotated[bool | None, Meta(description="Give the prompt back before the text.")] = None
    logprobs: Annotated[
        _TopLogprobs | None,
        Meta(description="Log-probabilities of each token and of that many likely tokens."),
    ] = None
    best_of: Annotated[int | None, Meta(description="Only the same as `n`.")] = None
    suffix: _NotSupported = None
    tools: _NotSupported = None
    tool_choice: _NotSupported = None
    response_format: ResponseFormat | None = None


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class GenerationUsage(msgspec.Struct, kw_only=True):
    """Tokens fed and generated. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Envelope(msgspec.Struct, kw_only=True):
    """Fields of every answer and every chunk."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A token; what is impossible has -9999.0."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob, kw_only=True):
    """A token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the tokens of an answer."""

    content: list[ChosenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call; a later chunk of a stream brings more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class AnswerToolCall(msgspec.Struct, kw_only=True):
    """A call that the model makes. `index` is there in streams, `id` and `type` once a call."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The model's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatAnswer(Envelope, kw_only=True):
    """Answers to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: GenerationUsage


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The part of a chunk that belongs to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Envelope, kw_only=True):
    """One event of a stream. `usage` is there when it was asked for, and null until the last."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: GenerationUsage | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Lists of one item a token; `text_offset` counts characters of the text before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation; in a stream, what comes next of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionAnswer(Envelope, kw_only=True):
    """Continuations, those of the first prompt first. A stream's events have the same form."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: GenerationUsage | UnsetType | None = UNSET
