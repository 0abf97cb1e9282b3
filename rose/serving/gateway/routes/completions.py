"""POST /v1/completions."""

import time

from starlette.responses import Response

from rose.serving.gateway.answer_head import Head
from rose.serving.gateway.completion_output import CompletionOutput
from rose.serving.gateway.generation_input import (
    Plan,
    plan_completion,
    table_of,
)
from rose.serving.gateway.generation_schemas import CompletionAnswer, CompletionRequest
from rose.serving.gateway.generation_service import respond
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation


async def completions(call: Call[CompletionRequest]) -> Response:
    """Continues prompts."""
    body, gateway = call.body, call.gateway
    model = gateway.table.choose(body.model, "generate", doing="generate text")
    card = model.card
    tokenizer = await model.tokenizer(gateway.pool)
    head = Head.new("cmpl", model.name, card)

    def prepare() -> tuple[Plan, CompletionOutput]:
        plan = plan_completion(body, card, tokenizer, gateway.settings.max_inputs)
        return plan, CompletionOutput(body, plan, head, table_of(tokenizer))

    started = time.perf_counter()
    plan, output = await call.in_thread(prepare)
    call.tokenized(model.name, started)
    return await respond(call, model, plan, output)


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/completions",
        aliases=("/completions",),
        handler=completions,
        summary="Continue prompts",
        description="The choices of the first prompt come first. With `stream` they come as "
        "server-sent events, each of the form of the answer with one choice; the last of a choice "
        "has its finish reason; then, if asked for, one with the usage; then `[DONE]`. A failure "
        'on the way is an event `{"error": {...}}`, after which the stream ends without `[DONE]`.',
        tag="Text generation",
        body=CompletionRequest,
        answer=CompletionAnswer,
        example={"prompt": "The sky is", "max_tokens": 16},
        statuses=BODY_ERRORS,
    ),
)
