"""POST /v1/embeddings."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from rose.models.card import EmbeddingCard, TokenOutput
from rose.serving.client_api import EmbedAnswer
from rose.serving.gateway.embedding_input import Prepared, check_supported, options_of, prepare
from rose.serving.gateway.embedding_output import check_finite, encode_answer
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.models import ServedModel
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.schemas import EmbeddingAnswer, EmbeddingRequest
from rose.serving.gateway.tokenization import Ids

# Fewer numbers than this are written out at once: a thread would cost more than it saves.
ENCODE_IN_THREAD_NUMBERS = 1 << 16
MAX_NUMBERS_SPARSE = 1 << 24  # of vectors as wide as the vocabulary, on their way: 64 MB
MAX_NUMBERS_PER_TOKEN = 1 << 23  # of an answer with a vector for each token: about 100 MB of JSON


@dataclass(frozen=True)
class Embedded:
    """Vectors of a request, and what they were made from."""

    model: ServedModel
    work: Prepared
    answer: EmbedAnswer

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
    done = await embed(call, body)
    as_base64 = body.encoding_format not in (None, "float")
    arguments = (done.answer.vectors, as_base64, done.model.name, done.usage)
    if done.answer.vectors.size > ENCODE_IN_THREAD_NUMBERS:
        content = await call.in_thread(encode_answer, *arguments)
    else:
        content = encode_answer(*arguments)
    return Response(content, media_type="application/json")


async def embed(
    call: Call[Any],
    body: EmbeddingRequest,
    *,
    per_token: TokenOutput | None = None,
    sparse: bool = False,
) -> Embedded:
    """Runs an embedding request, in whatever route it came; see `EngineClient.embed`.

    Raises:
        ApiError: The request is wrong, or its vectors are not finite.
        EngineError: The engine failed.
    """
    gateway = call.gateway
    check_supported(body)
    model = gateway.table.choose(body.model, "embed", doing="embed texts")
    card = model.card
    assert card.embedding is not None
    if not per_token:
        _check_output(card.embedding, sparse=sparse)
    options = options_of(body, card.embedding, gateway.settings)
    tokenizer = await model.tokenizer(gateway.pool)
    started = time.perf_counter()
    work = await call.in_thread(prepare, body, card, tokenizer, gateway.settings)
    if per_token:
        _check_size(work.ids, 1 if per_token == "token_weights" else card.embedding.dimensions)
    elif sparse:
        _check_count(work.ids, card.embedding.dimensions)
    gateway.metrics.tokenized(model.name, started)
    answer = await model.client.embed(
        work.ids,
        options,
        pool_from=work.pool_from,
        per_token=per_token,
        priority=body.priority or "online",
        timeout_s=call.time_left_s(),
        trace=call.exchange.request_id,
    )
    check_finite(answer.vectors, [len(row) for row in work.ids] if per_token else None)
    done = Embedded(model, work, answer)
    count(call, done)
    return done


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
        raise bad_request(f"This model has no dense vectors but {kinds}: /embed_sparse.", "model")


def _check_count(ids: Sequence[Ids], width: int) -> None:
    """Refuses more texts than there is room for vectors as wide as the vocabulary."""
    most = max(1, MAX_NUMBERS_SPARSE // width)
    if len(ids) > most:
        raise bad_request(f"'input' has {len(ids)} texts; at most {most} a request.", "input")


def count(call: Call[Any], done: Embedded) -> None:
    """Counts a request in the metrics."""
    metrics, name = call.gateway.metrics, done.model.name
    metrics.tokens.labels(name).inc(done.tokens)
    metrics.truncated.labels(name).inc(done.work.truncated)
    metrics.batch_size.labels(name).observe(len(done.work.ids))
    metrics.queue_seconds.labels(name).observe(done.answer.queued_s)
    metrics.compute_seconds.labels(name).observe(done.answer.computed_s)


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
