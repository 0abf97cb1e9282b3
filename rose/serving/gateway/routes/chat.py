"""POST /v1/chat/completions."""

import time

from starlette.responses import Response

from rose.serving.gateway.answer_head import Head
from rose.serving.gateway.chat_output import ChatOutput
from rose.serving.gateway.generation_input import Plan, plan_chat, table_of
from rose.serving.gateway.generation_schemas import ChatAnswer, ChatRequest
from rose.serving.gateway.generation_service import respond
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation


async def chat(call: Call[ChatRequest]) -> Response:
    """Goes on with a conversation."""
    body, gateway = call.body, call.gateway
    model = gateway.table.choose(body.model, "generate", doing="generate text")
    card = model.card
    tokenizer = await model.tokenizer(gateway.pool)
    head = Head.new("chatcmpl", model.name, card)

    def prepare() -> tuple[Plan, ChatOutput]:
        plan = plan_chat(body, card, tokenizer)
        return plan, ChatOutput(body, plan, head, table_of(tokenizer))

    started = time.perf_counter()
    plan, output = await call.in_thread(prepare)
    call.tokenized(model.name, started)
    return await respond(call, model, plan, output)


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        aliases=("/chat/completions",),
        handler=chat,
        summary="Answer a conversation",
        description="With `stream` the answer comes as server-sent events: for each choice a chunk "
        "with the role, chunks with content, and one with the finish reason; then, if asked for, "
        "one with the usage; then `[DONE]`. A failure on the way is an event "
        '`{"error": {...}}`, after which the stream ends without `[DONE]`.',
        tag="Text generation",
        body=ChatRequest,
        answer=ChatAnswer,
        example={"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64},
        statuses=BODY_ERRORS,
    ),
)
