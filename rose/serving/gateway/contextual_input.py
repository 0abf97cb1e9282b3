"""From documents in chunks to token ids, and the tokens of each chunk among them.

The chunks are tokenised one by one and joined: by the separator of a model that was trained with
one, else directly. So a chunk's tokens are known whatever stands in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.models.card import EmbeddingCard, ModelCard
from rose.serving.gateway.contextual_schemas import ContextualRequest
from rose.serving.gateway.embedding_input import check_known
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.prompts import choose_prompt
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.tokenization import Ids, Tokenizer
from rose.serving.gateway.truncation import Limit, limit_of

# Poolings for which a part of a text is like a text: the first token of a part sums up nothing, and
# weights by position depend on where they are counted from.
SPAN_POOLINGS = ("last", "max", "mean", "mean_sqrt_len")

Bounds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Documents:
    """What the engine is asked, and what the answer reports.

    Attributes:
        ids: int32 [tokens] of each document.
        spans: int32 [chunks, 2] of each document: a chunk's first token, and the one after its
            last.
        truncated: Tokens that were cut off, over all documents.
    """

    ids: list[Ids]
    spans: list[Bounds]
    truncated: int


def check_pooling(card: EmbeddingCard) -> None:
    """Refuses a model whose pooling has no meaning for a part of a text.

    Raises:
        ApiError: 400.
    """
    if card.chat is not None:
        raise bad_request("This model takes texts as conversations, not in chunks.", "model")
    for mode in card.pooling.split("+"):
        if mode not in SPAN_POOLINGS:
            message = f"This model's pooling '{mode}' has no meaning for a chunk of a document."
            raise bad_request(message, "model")


def prepare_documents(
    body: ContextualRequest, card: ModelCard, tokenizer: Tokenizer, settings: GatewaySettings
) -> Documents:
    """Turns documents into ids. CPU work: call it off the event loop.

    Raises:
        ApiError: 400, naming the document or the chunk at fault.
    """
    assert card.embedding is not None
    documents = checked_documents(body.input, settings.max_inputs)
    limit = _limit(body, card, settings)
    prompt = choose_prompt(embedding_request(body), card.embedding)
    limit.check_prompt(prompt, len(documents), tokenizer)
    layout = _layout(
        tokenizer, card.embedding, prompt, special=body.add_special_tokens is not False
    )
    limit.check_room(len(layout.prefix) + len(layout.prompt) + len(layout.suffix))
    rows = _encode(documents, prompt, limit, tokenizer)
    built = [layout.join(chunks) for chunks in rows]
    whole = sum(len(ids) for ids, _ in built)
    fitted = [layout.fit(f"input[{i}]", *document, limit) for i, document in enumerate(built)]
    ids, spans = ([pair[i] for pair in fitted] for i in (0, 1))
    for i, row in enumerate(ids):
        check_known(f"input[{i}]", row, card.vocab_size)
    return Documents(ids, spans, whole - sum(map(len, ids)))


def checked_documents(documents: list[list[str]] | None, max_inputs: int) -> list[list[str]]:
    """The documents of a request, none of them or of their chunks empty.

    Raises:
        ApiError: 400, naming what is missing, empty or too much.
    """
    if documents is None:
        raise bad_request("'input' is missing.", "input")
    if not documents:
        raise bad_request("'input' is an empty list.", "input")
    chunks = sum(map(len, documents))
    if chunks > max_inputs:
        message = f"'input' has {chunks} chunks; at most {max_inputs} a request."
        raise bad_request(message, "input")
    for i, document in enumerate(documents):
        if not document:
            raise bad_request(f"'input[{i}]' has no chunks.", f"input[{i}]")
        for j, chunk in enumerate(document):
            if not chunk:
                raise bad_request(f"'input[{i}][{j}]' is empty.", f"input[{i}][{j}]")
    return documents


_SHARED = (
    "model",
    "encoding_format",
    "output_dtype",
    "dimensions",
    "prompt_name",
    "prompt",
    "input_type",
    "truncate",
    "truncate_prompt_tokens",
    "truncation_side",
    "normalize",
    "priority",
)


def embedding_request(body: ContextualRequest) -> EmbeddingRequest:
    """The fields that mean the same for /v1/embeddings."""
    shared: dict[str, Any] = {name: getattr(body, name) for name in _SHARED}
    return EmbeddingRequest(**shared)


def _limit(body: ContextualRequest, card: ModelCard, settings: GatewaySettings) -> Limit:
    if body.truncation_side == "left" or body.truncate == "START":
        name = "truncation_side" if body.truncation_side == "left" else "truncate"
        raise bad_request("Documents in chunks are cut at their end only.", name)
    return limit_of(embedding_request(body), card, settings)


def _encode(
    documents: Sequence[Sequence[str]], prompt: str, limit: Limit, tokenizer: Tokenizer
) -> list[list[Ids]]:
    """The ids of each chunk, the first of a document with the prompt before it."""
    texts: list[str] = []
    for i, document in enumerate(documents):
        for j, chunk in enumerate(document):
            limit.check_length(f"input[{i}]", chunk, tokenizer)
            texts.append(chunk if j else prompt + chunk)
    rows = iter(tokenizer.encode(texts, add_special_tokens=False))
    return [[next(rows) for _ in document] for document in documents]


@dataclass(frozen=True)
class _Layout:
    """What stands around the chunks of a document.

    Attributes:
        prefix: Special tokens before the first chunk, int32.
        suffix: Special tokens after the last chunk, int32.
        separator: Token between two chunks; None: nothing is.
        prompt: Tokens of the prompt, which the first chunk begins with, int32.
    """

    prefix: Ids
    suffix: Ids
    separator: int | None
    prompt: Ids

    def join(self, chunks: Sequence[Ids]) -> tuple[Ids, Bounds]:
        """The tokens of a document and the span of each chunk."""
        between = [] if self.separator is None else [np.array([self.separator], np.int32)]
        parts: list[Ids] = [self.prefix]
        for i, chunk in enumerate(chunks):
            parts += [*between, chunk] if i else [chunk]
        parts.append(self.suffix)
        lengths = np.array([len(chunk) for chunk in chunks], np.int32)
        ends = len(self.prefix) + np.cumsum(lengths) + len(between) * np.arange(len(chunks))
        bounds = np.stack([ends - lengths, ends], axis=1).astype(np.int32)
        head = _common_length(self.prompt, chunks[0])
        bounds[0, 0] += head
        if self.separator is not None:
            self._reach_out(bounds, head)
        return np.concatenate(parts), bounds

    def _reach_out(self, bounds: Bounds, head: int) -> None:
        """Take what stands between two separators, as a model with a separator was trained.

        The first chunk takes the special tokens before it, the last one those after it, up to the
        first that is the separator itself.
        """
        if not head:
            bounds[0, 0] = 0
        stops = np.flatnonzero(self.suffix == self.separator)
        bounds[-1, 1] += stops[0] if len(stops) else len(self.suffix)

    def fit(self, place: str, ids: Ids, bounds: Bounds, limit: Limit) -> tuple[Ids, Bounds]:
        """A document within the limit, its last chunk cut if need be.

        Raises:
            ApiError: 400, naming the document that is too long, or the chunk of which nothing would
                be left, or that has no tokens.
        """
        empty = np.flatnonzero(bounds[:, 1] <= bounds[:, 0])
        if len(empty):
            raise bad_request(f"'{place}[{empty[0]}]' has no tokens.", f"{place}[{empty[0]}]")
        over = len(ids) - limit.tokens
        if over <= 0:
            return ids, bounds
        if not limit.cut:
            raise limit.too_long(place, f"{len(ids)} tokens")
        end = len(ids) - len(self.suffix) - over
        lost = np.flatnonzero(bounds[:, 0] >= end)
        if len(lost):
            message = (
                f"'{place}' has {len(ids)} tokens; cut to {limit.tokens}, "
                f"nothing of '{place}[{lost[0]}]' would be left."
            )
            raise bad_request(message, f"{place}[{lost[0]}]", "context_length_exceeded")
        bounds[-1, 1] -= over
        return np.concatenate([ids[:end], ids[len(ids) - len(self.suffix) :]]), bounds


def _layout(tokenizer: Tokenizer, card: EmbeddingCard, prompt: str, *, special: bool) -> _Layout:
    none = np.zeros(0, np.int32)
    return _Layout(
        tokenizer.prefix if special else none,
        tokenizer.suffix if special else none,
        card.chunk_separator,
        tokenizer.encode([prompt], add_special_tokens=False)[0] if prompt else none,
    )


def _common_length(prompt: Ids, text: Ids) -> int:
    """How many tokens of a prompt a text begins with: its last may have merged with the text."""
    size = min(len(prompt), len(text))
    differ = np.flatnonzero(prompt[:size] != text[:size])
    return int(differ[0]) if len(differ) else size
