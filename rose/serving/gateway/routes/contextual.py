"""POST /v1/contextualizedembeddings."""

import time

from starlette.responses import Response

from rose.serving.gateway.contextual_input import (
    check_pooling,
    embedding_request,
    prepare_documents,
)
from rose.serving.gateway.contextual_schemas import ContextualAnswer, ContextualRequest
from rose.serving.gateway.embedding_input import Prepared, options_of
from rose.serving.gateway.embedding_output import check_finite, encode_documents
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.routes.embeddings import Embedded, count


async def contextual(call: Call[ContextualRequest]) -> Response:
    """Embeds the chunks of documents, each with its document in view."""
    body, gateway = call.body, call.gateway
    model = gateway.table.choose(body.model, "embed", doing="embed texts")
    card = model.card
    assert card.embedding is not None
    check_pooling(card.embedding)
    options = options_of(embedding_request(body), card.embedding, gateway.settings)
    tokenizer = await model.tokenizer(gateway.pool)
    started = time.perf_counter()
    work = await call.in_thread(prepare_documents, body, card, tokenizer, gateway.settings)
    call.tokenized(model.name, started)
    answer = await model.client.embed(
        work.ids,
        options,
        spans=work.spans,
        priority=body.priority or "online",
        trace=call.exchange.request_id,
    )
    counts = [len(spans) for spans in work.spans]
    check_finite(answer.vectors, counts)
    done = Embedded(model, Prepared(work.ids, 0, work.truncated), answer)
    count(call, done)
    as_base64 = body.encoding_format not in (None, "float")
    content = await call.in_thread(
        encode_documents, answer.vectors, counts, as_base64, model.name, done.usage
    )
    return Response(content, media_type="application/json")


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/contextualizedembeddings",
        aliases=("/contextualizedembeddings",),
        handler=contextual,
        summary="Embed the chunks of documents",
        description="The chunks of a document go through the model together, so that each sees the "
        "others; the vector of a chunk is pooled over its own tokens.",
        tag="Embeddings",
        body=ContextualRequest,
        answer=ContextualAnswer,
        example={"input": [["Marie Curie was born in Warsaw.", "She moved to Paris in 1891."]]},
        statuses=BODY_ERRORS,
    ),
)
