"""Bodies of the routes that text-embeddings-inference has, as its clients send them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rose.serving.gateway.schemas import Request

Direction = Literal["left", "right", "Left", "Right"]
Cut = Annotated[
    bool | None, Meta(description="Cut texts that are too long; default: what the server does.")
]
Side = Annotated[Direction | None, Meta(description="Where they are cut; default `right`.")]
PromptName = Annotated[
    str | None, Meta(description="Put this prompt of the model before each text.")
]


class EmbedRequest(Request, kw_only=True):
    """Texts to embed."""

    inputs: Annotated[
        str | list[str | int | list[int]] | None,
        Meta(
            description="A text, a list of texts, token ids, or a list of token ids.",
            examples=["a red kite over the hill"],
        ),
    ] = None
    normalize: Annotated[bool | None, Meta(description="Scale to length 1; default true.")] = None
    truncate: Cut = None
    truncation_direction: Side = None
    prompt_name: PromptName = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Keep the first so many numbers.")
    ] = None


class EmbedSparseRequest(Request, kw_only=True):
    """Texts of which to get the weights of tokens."""

    inputs: Annotated[
        str | list[str | int | list[int]] | None,
        Meta(
            description="A text, a list of texts, token ids, or a list of token ids.",
            examples=["a red kite over the hill"],
        ),
    ] = None
    truncate: Cut = None
    truncation_direction: Side = None
    prompt_name: PromptName = None


class EmbedAllRequest(EmbedSparseRequest, kw_only=True):
    """Texts of which to get a vector for each token."""

    output: Annotated[
        Literal["hidden_states", "multi_vector"] | None,
        Meta(
            description="`multi_vector`: vectors to compare token by token (BGE-M3, ColBERT; the "
            "default of late-interaction models)."
        ),
    ] = None
    input_type: Annotated[
        str | None,
        Meta(description="`query` or `document`: late-interaction models need to know."),
    ] = None


class SimpleToken(msgspec.Struct, kw_only=True):
    """A token of a text: characters `start` to `stop` - 1; special ones stand nowhere in it."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class SimilarityInputs(msgspec.Struct, kw_only=True):
    """A text, and those to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, kw_only=True):
    """How the texts are read."""

    truncate: Cut = None
    truncation_direction: Side = None
    prompt_name: PromptName = None


class SimilarityRequest(Request, kw_only=True):
    """Texts to compare by the cosine of their vectors."""

    inputs: SimilarityInputs | None = None
    parameters: SimilarityParameters | None = None


class DecodeRequest(Request, kw_only=True):
    """Token ids to turn into texts."""

    ids: Annotated[
        list[int | list[int]] | None,
        Meta(description="Token ids, or a list of them.", examples=[[101, 2417, 20497, 102]]),
    ] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Default true.")] = None


class Info(msgspec.Struct, kw_only=True):
    """What serves the embeddings, or else ranks or classifies, and its limits."""

    model_id: str
    model_dtype: str
    model_type: dict[str, dict[str, Any]]
    max_input_length: int
    max_client_batch_size: int
    max_concurrent_requests: int
    version: str
