"""POST /v1/embeddings."""

import time

from starlette.responses import Response

from rose.serving.client_api import EmbedAnswer
from rose.serving.gateway.embedding_input import Prepared, check_supported, options_of, prepare
from rose.serving.gateway.embedding_output import check_finite, encode_answer
from rose.serving.gateway.models import ServedModel
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.schemas import EmbeddingAnswer, EmbeddingRequest

# Fewer numbers than this are written out at once: a thread would cost more than it saves.
ENCODE_IN_THREAD_NUMBERS = 1 << 16


async def embeddings(call: Call[EmbeddingRequest]) -> Response:
    """Embeds texts, token ids or a conversation."""
    body, gateway = call.body, call.gateway
    check_supported(body)
    model = gateway.table.choose(body.model, "embed")
    card = model.card
    assert card.embedding is not None
    options = options_of(body, card.embedding, gateway.settings)
    tokenizer = await model.tokenizer(gateway.pool)
    started = time.perf_counter()
    work = await call.in_thread(prepare, body, card, tokenizer, gateway.settings)
    gateway.metrics.tokenize_seconds.labels(model.name).observe(time.perf_counter() - started)
    answer = await model.client.embed(
        work.ids,
        options,
        pool_from=work.pool_from,
        priority=body.priority or "online",
        timeout_s=call.time_left_s(),
        trace=call.exchange.request_id,
    )
    return await _respond(call, model, work, answer)


async def _respond(
    call: Call[EmbeddingRequest], model: ServedModel, work: Prepared, answer: EmbedAnswer
) -> Response:
    check_finite(answer.vectors)
    tokens = sum(map(len, work.ids))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    if work.truncated:
        usage["truncated_tokens"] = work.truncated
    _count(call, model, work, answer, tokens)
    as_base64 = call.body.encoding_format not in (None, "float")
    arguments = (answer.vectors, as_base64, model.name, usage)
    if answer.vectors.size > ENCODE_IN_THREAD_NUMBERS:
        content = await call.in_thread(encode_answer, *arguments)
    else:
        content = encode_answer(*arguments)
    return Response(content, media_type="application/json")


def _count(
    call: Call[EmbeddingRequest],
    model: ServedModel,
    work: Prepared,
    answer: EmbedAnswer,
    tokens: int,
) -> None:
    metrics = call.gateway.metrics
    metrics.tokens.labels(model.name).inc(tokens)
    metrics.truncated.labels(model.name).inc(work.truncated)
    metrics.batch_size.labels(model.name).observe(len(work.ids))
    metrics.queue_seconds.labels(model.name).observe(answer.queued_s)
    metrics.compute_seconds.labels(model.name).observe(answer.computed_s)


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
