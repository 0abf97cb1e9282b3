"""POST /tokenize and /detokenize."""

from starlette.responses import Response

from rose.serving.gateway.embedding_input import check_ids
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.routes.models import json_response
from rose.serving.gateway.schemas import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)


async def tokenize(call: Call[TokenizeRequest]) -> Response:
    """Token ids of a text; nothing is cut."""
    body = call.body
    text = _text_of(body, call.gateway.settings.max_tokenize_chars)
    model = call.gateway.table.choose(body.model)
    tokenizer = await model.tokenizer(call.gateway.pool)
    special = body.add_special_tokens is not False

    def work() -> Response:
        tokens = tokenizer.encode([text], add_special_tokens=special)[0].tolist()
        strings = tokenizer.token_strings(tokens) if body.return_token_strs else None
        answer = TokenizeAnswer(
            tokens=tokens,
            count=len(tokens),
            max_model_len=model.card.max_model_len,
            token_strs=strings,
        )
        return json_response(answer)

    return await call.in_thread(work)


def _text_of(body: TokenizeRequest, max_chars: int) -> str:
    if body.prompt is not None and body.text is not None:
        raise bad_request("Give 'prompt' or 'text', not both.", "text")
    text = body.prompt if body.prompt is not None else body.text
    if text is None:
        raise bad_request("'prompt' is missing.", "prompt")
    if len(text) > max_chars:
        name = "prompt" if body.prompt is not None else "text"
        message = f"'{name}' has {len(text)} characters; at most {max_chars} are tokenised."
        raise bad_request(message, name)
    return text


async def detokenize(call: Call[DetokenizeRequest]) -> Response:
    """The text of token ids."""
    body = call.body
    if body.tokens is None:
        raise bad_request("'tokens' is missing.", "tokens")
    model = call.gateway.table.choose(body.model)
    size = model.card.vocab_size
    if body.tokens:
        check_ids("tokens", body.tokens, size)
    tokenizer = await model.tokenizer(call.gateway.pool)
    skip = bool(body.skip_special_tokens)
    text = await call.in_thread(tokenizer.decode, body.tokens, skip_special_tokens=skip)
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
        statuses=BODY_ERRORS,
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
        statuses=BODY_ERRORS,
    ),
)
