"""Bodies of the routes that score: ranking, pairs, and classification."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rose.runtime.options import Priority
from rose.serving.gateway.schemas import Request, Usage
from rose.serving.gateway.tei_schemas import Direction

Strategy = Literal["longest_first", "only_second"]


class TextItem(msgspec.Struct, kw_only=True):
    """A text as an object; other fields are ignored."""

    text: str


Text = str | TextItem


class ScoringRequest(Request, kw_only=True):
    """What the routes have in common: how texts are read, and which numbers come back."""

    raw_scores: Annotated[
        bool | None,
        Meta(description="Give the model's own numbers, before any activation; default false."),
    ] = None
    prompt_name: Annotated[
        str | None, Meta(description="Put this prompt of the model before the query.")
    ] = None
    prompt: Annotated[str | None, Meta(description="Put this text before the query.")] = None
    truncate: Annotated[
        bool | Literal["NONE", "START", "END"] | None,
        Meta(description="Cut what is too long instead of refusing it."),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Cut pairs to so many tokens; -1: to the model's maximum."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        Meta(description="Where tokens are dropped; default: the tokenizer's, mostly `right`."),
    ] = None
    truncation_direction: Annotated[
        Direction | None, Meta(description="The same by TEI's name.")
    ] = None
    priority: Annotated[
        Priority | None, Meta(description="`bulk` lets online requests pass first.")
    ] = None
    use_activation: Annotated[
        bool | None, Meta(description="false is not supported: use `raw_scores`.")
    ] = None


class PairRequest(ScoringRequest, kw_only=True):
    """How pairs of a query and a document are read."""

    instruction: Annotated[
        str | None,
        Meta(description="What to look for, for models whose prompt has a place for it."),
    ] = None
    truncation_strategy: Annotated[
        Strategy | None,
        Meta(
            description="Of which text tokens are dropped: of the longer one (`longest_first`, "
            "the default), or of the document alone (`only_second`)."
        ),
    ] = None
    max_tokens_per_doc: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Cut each document to so many tokens, and further where its pair is still "
            "too long, unless `truncate` is false."
        ),
    ] = None
    max_chunks_per_doc: Annotated[int | None, Meta(description="Not supported.")] = None


class RerankRequest(PairRequest, kw_only=True):
    """Documents to rank by a query: the form of Cohere and Jina, or that of TEI with `texts`."""

    query: Annotated[
        Text | None, Meta(description="What is looked for.", examples=["a bird of prey"])
    ] = None
    documents: Annotated[
        list[Text] | None,
        Meta(description="Texts, or objects with a `text`.", examples=[["a red kite", "tea"]]),
    ] = None
    texts: Annotated[
        list[Text] | None,
        Meta(description="The documents by TEI's name; the answer has TEI's form then."),
    ] = None
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Give the best so many; default, and at most: all."),
    ] = None
    return_documents: Annotated[
        bool | None, Meta(description="Give the documents' texts too; default false.")
    ] = None
    return_text: Annotated[bool | None, Meta(description="The same by TEI's name.")] = None
    rank_fields: Annotated[list[str] | None, Meta(description="Not supported.")] = None


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document's place in the request, and its score."""

    index: int
    relevance_score: float
    document: TextItem | None = None


class MetaTokens(msgspec.Struct, kw_only=True):
    """Tokens by Cohere's names."""

    input_tokens: int


class RankingMeta(msgspec.Struct, kw_only=True):
    """What Cohere's clients read beside the results."""

    tokens: MetaTokens


class RerankAnswer(msgspec.Struct, kw_only=True):
    """Documents by falling score; equal ones in the order of the request."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: Usage
    meta: RankingMeta


class RankedText(msgspec.Struct, kw_only=True, omit_defaults=True):
    """TEI's form of a ranked document."""

    index: int
    score: float
    text: str | None = None


class ScoreRequest(PairRequest, kw_only=True):
    """Pairs to score: one text with each of others, or as many with as many, in order."""

    text_1: Annotated[
        Text | list[Text] | None, Meta(description="The first text of each pair, or of all.")
    ] = None
    text_2: Annotated[Text | list[Text] | None, Meta(description="The second texts.")] = None
    queries: Annotated[Text | list[Text] | None, Meta(description="`text_1` by another name.")] = (
        None
    )
    documents: Annotated[
        Text | list[Text] | None, Meta(description="`text_2` by another name.")
    ] = None


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(msgspec.Struct, kw_only=True):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    model: str
    data: list[Score]
    usage: Usage


class ClassifyRequest(ScoringRequest, kw_only=True):
    """Texts, or pairs of texts, to classify."""

    input: Annotated[
        str | list[str | list[str]] | None,
        Meta(
            description="A text, or a list of texts, each of which may be a pair: a list of two.",
            examples=["a red kite over the hill"],
        ),
    ] = None
    inputs: Annotated[
        str | list[str | list[str]] | None,
        Meta(
            description="The same in TEI's form, where a list of one or two strings is one text or "
            "one pair, and several are a list of such lists. The answer has TEI's form then."
        ),
    ] = None
    labels: Annotated[Any, Meta(description="Not supported: labels are the model's own.")] = None


class Classification(msgspec.Struct, kw_only=True):
    """The most probable label, and the probability of each in the order of `labels`."""

    index: int
    object: Literal["classification"] = "classification"
    label: str
    score: float
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct, kw_only=True):
    """Classes in the order of the input."""

    id: str
    object: Literal["list"] = "list"
    model: str
    labels: list[str]
    data: list[Classification]
    usage: Usage


class Prediction(msgspec.Struct, kw_only=True):
    """A label and its probability; TEI's form."""

    score: float
    label: str
