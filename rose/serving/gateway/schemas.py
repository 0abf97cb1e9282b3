"""Bodies of requests and answers. What stands here is what /openapi.json says."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rose.runtime.options import OutputDtype, Priority

EncodingFormat = Literal["float", "base64", "base64_int8", "base64_binary"]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Request(msgspec.Struct, kw_only=True):
    """Fields of every request. null means absent; unknown fields are ignored."""

    model: Annotated[
        str | None, Meta(description="Name of a served model; may be left out if there is one.")
    ] = None
    user: Annotated[str | None, Meta(description="Accepted and ignored.")] = None
    request_id: Annotated[
        str | None,
        Meta(description="Up to 128 printable ASCII characters; comes back as X-Request-Id."),
    ] = None


_Elsewhere = Annotated[Any, Meta(description="Not supported: another server's name.")]


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message."""

    type: Annotated[str, Meta(description="Only `text` is supported.")]
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None


class EmbeddingRequest(Request, kw_only=True):
    """Texts to embed, and how."""

    input: Annotated[
        str | list[str | int | list[int]] | None,
        Meta(
            description="A text, a list of texts, one text's token ids, or a list of such lists. "
            "Ids are used as given: no prompt and no special tokens are added.",
            examples=["a red kite over the hill"],
        ),
    ] = None
    messages: Annotated[
        list[ChatMessage] | None,
        Meta(description="One conversation instead of `input`, for models with a chat template."),
    ] = None
    encoding_format: Annotated[
        EncodingFormat | None,
        Meta(
            description="`float` (default): numbers. `base64`: the little-endian bytes of the "
            "vector. `base64_int8`, `base64_binary`: the same of that output type."
        ),
    ] = None
    output_dtype: Annotated[
        OutputDtype | None, Meta(description="Type of the numbers; default `float32`.")
    ] = None
    output_types: Annotated[
        list[str] | None,
        Meta(
            description="Kinds of vectors, computed in one pass, of those that the model has: "
            "`dense` (default), `sparse`, `multi_vector`. Each entry of the answer has "
            "`embedding`, `sparse_embedding` and `multi_vector_embedding`, as asked for; "
            "`dimensions`, `normalize` and `output_dtype` are for `embedding`."
        ),
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Keep the first so many numbers, then normalise again."),
    ] = None
    prompt_name: Annotated[
        str | None, Meta(description="Put this prompt of the model before each text.")
    ] = None
    prompt: Annotated[str | None, Meta(description="Put this text before each text.")] = None
    input_type: Annotated[
        str | None,
        Meta(
            description="What the texts are: `query` or `document` (also `search_query`, "
            "`search_document`, `passage`), or a prompt's name. Picks the model's prompt. "
            "Late-interaction models need to know."
        ),
    ] = None
    truncate: Annotated[
        bool | Literal["NONE", "START", "END"] | None,
        Meta(description="Cut texts that are too long instead of refusing them."),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut texts to so many tokens; -1: to the model's maximum."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        Meta(description="Where tokens are dropped; default: the tokenizer's, mostly `right`."),
    ] = None
    normalize: Annotated[
        bool | None, Meta(description="Scale to length 1; default: as the checkpoint says.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Default true for texts, false for messages."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="With `messages`: end with the start of an answer.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="With `messages`: variables for the template.")
    ] = None
    priority: Annotated[
        Priority | None, Meta(description="`bulk` lets online requests pass first.")
    ] = None
    chat_template: Annotated[str | None, Meta(description="Not supported.")] = None
    late_chunking: Annotated[bool | None, Meta(description="Not supported.")] = None
    return_multivector: Annotated[
        bool | None, Meta(description="Not supported: use `output_types`.")
    ] = None
    output_dimension: Annotated[
        int | None, Meta(description="Not supported: use `dimensions`.")
    ] = None
    embedding_type: Annotated[
        str | list[str] | None,
        Meta(description="Not supported: use `encoding_format`, `output_dtype`, `output_types`."),
    ] = None
    pooling: Annotated[str | None, Meta(description="Not supported: the checkpoint says.")] = None
    pooling_type: Annotated[str | None, Meta(description="Not supported: the checkpoint says.")] = (
        None
    )
    embedding_types: Annotated[
        list[str] | None, Meta(description="Not supported: use `output_dtype`.")
    ] = None
    embed_dtype: _Elsewhere = None
    endianness: _Elsewhere = None
    instruction: _Elsewhere = None
    normalized: _Elsewhere = None
    task: _Elsewhere = None
    truncation: _Elsewhere = None
    use_activation: _Elsewhere = None


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokens fed to the model. `truncated_tokens` were cut off; it is there if any were."""

    prompt_tokens: int
    total_tokens: int
    truncated_tokens: int = 0


class SparseValue(msgspec.Struct, kw_only=True):
    """A token of the vocabulary, and its weight."""

    index: int
    value: float


class Embedding(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was asked for of one text: a vector is numbers, or base64 of its bytes."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str | None = None
    sparse_embedding: list[SparseValue] | None = None
    multi_vector_embedding: list[list[float] | str] | None = None


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    """Vectors in the order of the input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelInfo(msgspec.Struct, kw_only=True):
    """A served model. What is null is not known until its engine has started."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "rose"
    ready: bool
    task: str | None = None
    tasks: list[str] = []
    max_model_len: int | None = None
    dimensions: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    architecture: str | None = None
    prompts: list[str] = []
    labels: list[str] = []
    output_types: list[str] = []


class ModelList(msgspec.Struct, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


class Health(msgspec.Struct, kw_only=True):
    """The gateway is alive."""

    status: Literal["ok"] = "ok"
    version: str


class Ready(msgspec.Struct, kw_only=True):
    """Every engine answers."""

    status: Literal["ready"] = "ready"
    models: list[str]
