"""Bodies of /v1/contextualizedembeddings."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rose.runtime.options import OutputDtype, Priority
from rose.serving.gateway.schemas import Embedding, EncodingFormat, Request, Usage


class ContextualRequest(Request, kw_only=True):
    """Documents in chunks, to embed each chunk as a part of its document."""

    input: Annotated[
        list[list[str]] | None,
        Meta(
            description="Documents, each a list of its chunks in their order.",
            examples=[[["Marie Curie was born in Warsaw.", "She moved to Paris in 1891."]]],
        ),
    ] = None
    encoding_format: Annotated[
        EncodingFormat | None, Meta(description="As for /v1/embeddings.")
    ] = None
    output_dtype: Annotated[
        OutputDtype | None, Meta(description="Type of the numbers; default `float32`.")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Keep the first so many numbers, then normalise again."),
    ] = None
    prompt_name: Annotated[
        str | None, Meta(description="Put this prompt of the model before each document.")
    ] = None
    prompt: Annotated[str | None, Meta(description="Put this text before each document.")] = None
    input_type: Annotated[
        str | None, Meta(description="Picks the model's prompt, as for /v1/embeddings.")
    ] = None
    truncate: Annotated[
        bool | Literal["NONE", "START", "END"] | None,
        Meta(description="Cut the last chunk of a document that is too long, at its end."),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut documents to so many tokens; -1: to the model's maximum."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, Meta(description="Only `right` is supported.")
    ] = None
    normalize: Annotated[
        bool | None, Meta(description="Scale to length 1; default: as the checkpoint says.")
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default true.")] = None
    priority: Annotated[
        Priority | None, Meta(description="`bulk` lets online requests pass first.")
    ] = None


class DocumentEmbeddings(msgspec.Struct, kw_only=True):
    """The vectors of one document's chunks, in their order."""

    object: Literal["list"]
    index: int
    data: list[Embedding]


class ContextualAnswer(msgspec.Struct, kw_only=True):
    """Documents in the order of the input."""

    object: Literal["list"]
    data: list[DocumentEmbeddings]
    model: str
    usage: Usage
