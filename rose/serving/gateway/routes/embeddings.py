"""POST /v1/embeddings."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from starlette.responses import Response

from rose.models.card import EmbeddingCard, ModelCard, RowOutput, Task
from rose.serving.client_api import EmbedAnswer
from rose.serving.gateway.embedding_input import (
    Prepared,
    check_supported,
    is_short,
    options_of,
    prepare,
)
from rose.serving.gateway.embedding_output import Vectors, check_finite, encode_answer
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.models import ServedModel
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.schemas import EmbeddingAnswer, EmbeddingRequest
from rose.serving.gateway.several_outputs import (
    Kinds,
    checked_types,
    encode_kinds,
    engine_outputs,
)
from rose.serving.gateway.sparse_output import SparseRow, of_tokens, of_vocabulary, unused_ids
from rose.serving.gateway.token_vectors import of_texts
from rose.serving.gateway.tokenization import Ids

# Fewer numbers than this are written out at once: a thread would cost more than it saves.
ENCODE_IN_THREAD_NUMBERS = 1 << 16
CHECK_IN_THREAD_NUMBERS = 1 << 20  # and than this, looked through for NaN
MAX_NUMBERS_SPARSE = 1 << 24  # of vectors as wide as the vocabulary, on their way: 64 MB
MAX_NUMBERS_PER_TOKEN = 1 << 23  # of an answer with a vector for each token: about 100 MB of JSON


@dataclass(frozen=True)
class Embedded:
    """Vectors of a request, and what they were made from."""

    model: ServedModel
    work: Prepared
    answer: EmbedAnswer
    outputs: tuple[RowOutput, ...] = ("text",)

    def rows(self, output: RowOutput) -> Vectors:
        """The rows of an output that was asked for."""
        return (self.answer.vectors, *self.answer.more)[self.outputs.index(output)]

    def token_vectors(self) -> list[Vectors]:
        """The vectors of each text's tokens, [vectors, width], of those that count."""
        card = self.model.card.embedding
        late, side = card.late if card else None, self.work.side or "document"
        return of_texts(self.rows("multi_vector"), self.work.ids, late, side)

    @property
    def numbers(self) -> int:
        """Numbers of all rows."""
        return sum(rows.size for rows in (self.answer.vectors, *self.answer.more))

    def check_finite(self) -> None:
        """Refuses NaN and infinity, for which JSON has no form.

        Raises:
            ApiError: 500, naming the text.
        """
        for output in self.outputs:
            counts = None if output == "text" else [len(row) for row in self.work.ids]
            check_finite(self.rows(output), counts)

    @property
    def tokens(self) -> int:
        """Tokens fed to the model."""
        return sum(map(len, self.work.ids))

    @property
    def usage(self) -> dict[str, int]:
        """What the answer reports."""
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        cut = self.work.truncated
        return {**usage, "truncated_tokens": cut} if cut else usage


async def embeddings(call: Call[EmbeddingRequest]) -> Response:
    """Embeds texts, token ids or a conversation."""
    body = call.body
    if body.output_types is not None:
        return await _several(call)
    done = await embed(call, body)
    as_base64 = body.encoding_format not in (None, "float")
    arguments = (done.answer.vectors, as_base64, done.model.name, done.usage)
    if done.answer.vectors.size > ENCODE_IN_THREAD_NUMBERS:
        content = await call.in_thread(encode_answer, *arguments)
    else:
        content = encode_answer(*arguments)
    return Response(content, media_type="application/json")


async def _several(call: Call[EmbeddingRequest]) -> Response:
    """Answers with the kinds of vectors that the request lists."""
    body = call.body
    model = call.gateway.table.choose(body.model, "embed", doing="embed texts")
    card = model.card.embedding
    assert card is not None
    types = checked_types(body, card, model.name)
    outputs = engine_outputs(types, card)
    done = await embed(call, body, outputs=outputs, sparse=card.outputs == ("sparse",))
    sparse = await sparse_rows(call, done) if "sparse" in types else None

    def encode() -> bytes:
        kinds = Kinds(
            done.rows("text") if "dense" in types else None,
            None if sparse is None else list(sparse),
            done.token_vectors() if "multi_vector" in types else None,
        )
        as_base64 = body.encoding_format not in (None, "float")
        return encode_kinds(kinds, len(done.work.ids), as_base64, model.name, done.usage)

    return Response(await call.in_thread(encode), media_type="application/json")


async def sparse_rows(call: Call[Any], done: Embedded) -> Iterator[SparseRow]:
    """The sparse vectors of a request's texts, of either form."""
    card = done.model.card
    if "token_weights" not in done.outputs:
        return of_vocabulary(done.rows("text").astype(np.float32, copy=False))
    tokenizer = await done.model.tokenizer(call.gateway.pool)
    unused = unused_ids(tokenizer, card.tokenizer.special_tokens)
    weights = done.rows("token_weights").astype(np.float32, copy=False)
    return of_tokens(done.work.ids, weights, unused)


async def embed(
    call: Call[Any],
    body: EmbeddingRequest,
    *,
    outputs: tuple[RowOutput, ...] = ("text",),
    sparse: bool = False,
    tasks: tuple[Task, ...] = ("embed",),
) -> Embedded:
    """Runs an embedding request, in whatever route it came; see `EngineClient.embed`.

    Args:
        call: The request.
        body: What is embedded, and how.
        outputs: What the engine computes, in one pass.
        sparse: Whether rows of texts may be as wide as the vocabulary.
        tasks: Of which the model has to have one.

    Raises:
        ApiError: The request is wrong, or its vectors are not finite.
        EngineError: The engine failed.
    """
    check_supported(body)
    model = call.gateway.table.choose(body.model, *tasks, doing="embed texts")
    facts = model.card
    card = facts.embedding
    assert card is not None
    if "text" in outputs:
        _check_output(card, sparse=sparse)
    options = options_of(body, card, call.gateway.settings)
    work = await _tokenized(call, body, model, facts)
    _check_sizes(work.ids, outputs, card, sparse=sparse)
    answer = await model.client.embed(
        work.ids,
        options,
        pool_from=work.pool_from,
        outputs=outputs,
        queries=work.side == "query",
        priority=body.priority or "online",
        trace=call.exchange.request_id,
    )
    done = Embedded(model, work, answer, outputs)
    if done.numbers > CHECK_IN_THREAD_NUMBERS:
        await call.in_thread(done.check_finite)
    else:
        done.check_finite()
    count(call, done)
    return done


async def _tokenized(
    call: Call[Any], body: EmbeddingRequest, model: ServedModel, card: ModelCard
) -> Prepared:
    gateway = call.gateway
    tokenizer = await model.tokenizer(gateway.pool)
    started = time.perf_counter()
    arguments = (body, card, tokenizer, gateway.settings)
    assert card.embedding is not None
    short = is_short(body, card.embedding)
    work = prepare(*arguments) if short else await call.in_thread(prepare, *arguments)
    call.tokenized(model.name, started)
    return work


def _check_sizes(
    ids: Sequence[Ids], outputs: Sequence[RowOutput], card: EmbeddingCard, *, sparse: bool
) -> None:
    """Refuses more numbers than an answer can reasonably hold."""
    for output in outputs:
        if output != "text":
            _check_size(ids, _width(output, card))
        elif sparse:
            _check_count(ids, card.dimensions)


def _width(output: RowOutput, card: EmbeddingCard) -> int:
    """Numbers of a token's row."""
    if output == "token_weights":
        return 1
    # Vectors of tokens that come beside a dense one (BGE-M3) are as wide as the hidden states.
    return card.dimensions if output == "multi_vector" and card.late else card.hidden_size


def _check_size(ids: Sequence[Ids], width: int) -> None:
    """Refuses more numbers than an answer can reasonably hold."""
    tokens, most = sum(map(len, ids)), MAX_NUMBERS_PER_TOKEN // width
    if tokens > most:
        message = f"'input' has {tokens} tokens; at most {most} a request get a vector each."
        raise bad_request(message, "input")


def _check_output(card: EmbeddingCard, *, sparse: bool) -> None:
    """Refuses dense vectors of a model that has none."""
    if not sparse and "dense" not in card.outputs:
        kinds = " and ".join(card.outputs)
        route = "/embed_all" if card.late else "/embed_sparse"
        message = f"This model has no dense vectors but {kinds}: 'output_types', or {route}."
        raise bad_request(message, "model")


def _check_count(ids: Sequence[Ids], width: int) -> None:
    """Refuses more texts than there is room for vectors as wide as the vocabulary."""
    most = max(1, MAX_NUMBERS_SPARSE // width)
    if len(ids) > most:
        raise bad_request(f"'input' has {len(ids)} texts; at most {most} a request.", "input")


def count(call: Call[Any], done: Embedded) -> None:
    """Counts a request in the metrics."""
    metrics, work, answer = call.gateway.metrics, done.work, done.answer
    numbers = len(work.ids), done.tokens, work.truncated, answer.queued_s, answer.computed_s
    metrics.later(partial(metrics.fed, done.model.name, *numbers))


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/embeddings",
        aliases=("/embeddings",),
        handler=embeddings,
        summary="Embed texts",
        description="Vectors of one or many texts, in the order of the input. An empty text gives "
        "the vector of the special tokens alone.",
        tag="Embeddings",
        body=EmbeddingRequest,
        answer=EmbeddingAnswer,
        example={"input": ["a red kite over the hill", "a bird of prey above the slope"]},
        statuses=BODY_ERRORS,
    ),
)
