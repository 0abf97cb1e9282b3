"""POST /tokenize and /detokenize."""

from starlette.responses import Response

from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.operation import Call, Operation
from rose.serving.gateway.routes.models import json_response
from rose.serving.gateway.schemas import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)


async def tokenize(call: Call[TokenizeRequest]) -> Response:
    """Token ids of a text; however long it is, nothing is cut."""
    body = call.body
    if body.prompt is not None and body.text is not None:
        raise bad_request("Give 'prompt' or 'text', not both.", "text")
    text = body.prompt if body.prompt is not None else body.text
    if text is None:
        raise bad_request("'prompt' is missing.", "prompt")
    model = call.gateway.table.choose(body.model)
    tokenizer = await model.tokenizer(call.gateway.pool)
    special = body.add_special_tokens is not False

    def work() -> TokenizeAnswer:
        tokens = tokenizer.encode([text], add_special_tokens=special)[0].tolist()
        strings = tokenizer.token_strings(tokens) if body.return_token_strs else None
        return TokenizeAnswer(
            tokens=tokens,
            count=len(tokens),
            max_model_len=model.card.max_model_len,
            token_strs=strings,
        )

    return json_response(await call.gateway.in_thread(work))


async def detokenize(call: Call[DetokenizeRequest]) -> Response:
    """The text of token ids."""
    body = call.body
    if body.tokens is None:
        raise bad_request("'tokens' is missing.", "tokens")
    model = call.gateway.table.choose(body.model)
    size = model.card.vocab_size
    for i, token in enumerate(body.tokens):
        if not 0 <= token < size:
            message = f"Token id {str(token)[:24]} is not in the vocabulary (0 to {size - 1})."
            raise bad_request(message, f"tokens[{i}]")
    tokenizer = await model.tokenizer(call.gateway.pool)
    skip = bool(body.skip_special_tokens)
    text = await call.gateway.in_thread(tokenizer.decode, body.tokens, skip_special_tokens=skip)
    return json_response(DetokenizeAnswer(prompt=text, text=text))


OPERATIONS = (
    Operation(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        summary="Turn a text into token ids",
        tag="Tokens",
        body=TokenizeRequest,
        answer=TokenizeAnswer,
        example={"prompt": "a red kite over the hill"},
        statuses=(400, 404, 413, 415, 429, 500, 503, 504),
    ),
    Operation(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        summary="Turn token ids into a text",
        tag="Tokens",
        body=DetokenizeRequest,
        answer=DetokenizeAnswer,
        example={"tokens": [101, 2417, 20497, 102]},
        statuses=(400, 404, 413, 415, 429, 500, 503, 504),
    ),
)
