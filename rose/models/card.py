"""The model card: what a gateway has to know of a served model. Free of torch.

The engine reads it from the checkpoint and sends it, with the tokenizer, in its handshake, so a
gateway needs no file of the model.
"""

from typing import Any, Literal

import msgspec

Task = Literal["embed", "generate", "score", "classify"]
EmbeddingOutput = Literal["dense", "sparse", "multi_vector"]
TokenOutput = Literal["hidden_states", "multi_vector", "token_weights"]
# What an engine computes: a row for each text (or span of it), or one for each token.
RowOutput = Literal["text", "hidden_states", "multi_vector", "token_weights"]
Side = Literal["query", "document"]


class ChatTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Texts reach the model as conversations, rendered by the default chat template.

    A text is one message of the role "user"; a pair is two, of the roles "query" and "document"; a
    prompt is a message of the role "system" before them. The rendered text is tokenised without
    special tokens. `parts` says that the template wants a message's content as a list of parts,
    `[{"type": "text", "text": ...}]`. `variables` are passed to the template.
    """

    parts: bool = False
    variables: dict[str, Any] = {}


class QueryExpansion(msgspec.Struct, frozen=True, kw_only=True):
    """Queries are filled up to `length` tokens with `token`, whose vectors count as any other.

    These see the query; with `attend` they are seen too.
    """

    token: int
    length: int
    attend: bool = False


class LateInteraction(msgspec.Struct, frozen=True, kw_only=True):
    """How queries and documents become vectors of their tokens, and these a score (ColBERT).

    `query_length` and `document_length` are the most tokens of each. A marker is a token that is
    put after the first one of a text; None where there is none (it may be in a prompt). Vectors of
    the tokens `skip_ids` are left out of texts of the sides `skip_sides`. The score is the sum,
    over the query's vectors, of the largest dot product with a vector of the document; with `mean`
    it is divided by their number.
    """

    query_length: int
    document_length: int
    query_marker: int | None = None
    document_marker: int | None = None
    expansion: QueryExpansion | None = None
    skip_ids: tuple[int, ...] = ()
    skip_sides: tuple[Side, ...] = ("document",)
    mean: bool = False

    def length(self, side: Side) -> int:
        """Return the most tokens of a text."""
        return self.query_length if side == "query" else self.document_length

    def marker(self, side: Side) -> int | None:
        """Return the token after the first one of a text."""
        return self.query_marker if side == "query" else self.document_marker


class EmbeddingCard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of an embedder.

    `dimensions` is the width of a finished vector (of a token where `late` is given), `hidden_size`
    that of the hidden states that it is made of. `matryoshka` lists the widths that the checkpoint
    says it was trained for (empty: it says nothing). `prompts` are text prefixes by name;
    `default_prompt_name` is the one that applies when a request names none. `chat` is given where
    texts, and with them prompts, pass through the chat template; prompts are pooled there.
    `quantizer` says how codes of whole numbers are made, see `rose.models.output`.
    `chunk_separator` is the token that stands between the chunks of a document where the model was
    trained so; None where nothing does. `outputs` are the kinds of vectors that it gives: a
    "sparse" one has a weight for each token of the vocabulary (where "dense" is there too: made of
    weights of the text's tokens), "multi_vector" a vector for each token of the text. `late` is
    given where texts are queries or documents that become such.
    """

    dimensions: int
    hidden_size: int
    normalize: bool
    pooling: str
    matryoshka: tuple[int, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    pools_prompt: bool = True
    chat: ChatTexts | None = None
    quantizer: Literal["scale", "tanh"] = "scale"
    chunk_separator: int | None = None
    outputs: tuple[EmbeddingOutput, ...] = ("dense",)
    late: LateInteraction | None = None


class PairTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """How a query and a document become one text, in three pieces.

    `body` is a `str.format` template with the fields `instruction`, `query` and `document`. The
    pieces are tokenised one by one without special tokens and joined; only the body may be cut.
    `instruction` is the default.
    """

    prefix: str
    body: str
    suffix: str
    instruction: str


class ScoringCard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a model that scores texts, or pairs of a query and a document.

    The engine answers with raw scores, one per label; `activation` (a name of
    `rose.models.output.ACTIVATIONS`) makes answers of them, `probabilities` probabilities of the
    labels. A "yes_no" model is a language model with one label.

    A pair is tokenised by `template` if there is one, else through the chat template if `chat` is
    given, else by the tokenizer's own template for pairs, where `segment_ids` says whether the
    model wants to know which token is of which text. `prompts` go before the query (with `chat`:
    into a message).
    """

    kind: Literal["cross_encoder", "yes_no"]
    labels: tuple[str, ...]
    activation: str
    probabilities: Literal["sigmoid", "softmax"]
    segment_ids: bool = False
    template: PairTemplate | None = None
    chat: ChatTexts | None = None
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


class TokenizerCard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the tokenizer beside its `tokenizer.json`.

    `special_tokens` maps names such as "bos_token" to their text; `chat_templates` maps a
    template's name ("default", "tool_use", ...) to its Jinja source; `lowercase` is
    sentence-transformers' `do_lower_case`, applied to the text before tokenisation;
    `split_special` says that the name of a special token in a text is text like any other;
    `truncation_side` is where text that is too long is cut.
    """

    special_tokens: dict[str, str] = {}
    chat_templates: dict[str, str] = {}
    lowercase: bool = False
    clean_up_spaces: bool = False
    split_special: bool = False
    truncation_side: Literal["left", "right"] = "right"


class GenerationCard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of an LLM.

    `eos_token_ids` end a sequence. `max_kv_tokens` is the most tokens (prompt and output) that one
    sequence can have in the page pool. The rest are the checkpoint's defaults for sampling
    (`generation_config.json`), None where it has none; a request's `logit_bias` goes before that of
    the same token here.
    """

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    max_kv_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    structured_output: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model.

    `max_model_len` counts tokens, special tokens included. `vocab_size` is the number of rows of
    the token embedding: ids from 0 to `vocab_size` - 1 can be fed. `fingerprint` is equal for
    replicas of the same checkpoint and settings. `created` is in seconds since the epoch.
    `quantization` is what the weights are rounded to, None where they are not.
    """

    name: str
    path: str
    architecture: str
    dtype: str
    tasks: tuple[Task, ...]
    vocab_size: int
    max_model_len: int
    fingerprint: str
    created: int
    tokenizer: TokenizerCard
    embedding: EmbeddingCard | None = None
    generation: GenerationCard | None = None
    scoring: ScoringCard | None = None
    quantization: str | None = None
