"""POST /tokenize and /detokenize."""

from collections.abc import Callable, Iterable, Sized

from starlette.responses import Response
from tokenizers import Encoding

from rose.models.card import ModelCard
from rose.serving.gateway.conversation import render_turns, turns_of
from rose.serving.gateway.embedding_input import check_ids
from rose.serving.gateway.errors import bad_request
from rose.serving.gateway.generation_schemas import ChatRequest
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.prompts import choose_prompt
from rose.serving.gateway.routes.models import json_response
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.tei_schemas import SimpleToken
from rose.serving.gateway.token_schemas import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from rose.serving.gateway.tools import forced_call

# Of the characters that /tokenize takes, those that get the places of their tokens: these are made
# and written in calls that let no other thread run.
PLACES_SHARE = 8
# What there can be to tokenise: one of these.
_FORMS = ("prompt", "text", "messages", "inputs")


async def tokenize(call: Call[TokenizeRequest]) -> Response:
    """Token ids of a text or of a conversation; nothing is cut."""
    body = call.body
    _check_forms(body)
    if body.inputs is not None:
        return await _tei_tokens(call, body.inputs)
    model = call.gateway.table.choose(body.model)
    text_of, special = _source_of(body, model.card, call.gateway.settings.max_tokenize_chars)
    tokenizer = await model.tokenizer(call.gateway.pool)

    def work() -> Response:
        tokens = tokenizer.encode([text_of()], add_special_tokens=special)[0].tolist()
        strings = tokenizer.token_strings(tokens) if body.return_token_strs else None
        answer = TokenizeAnswer(
            tokens=tokens,
            count=len(tokens),
            max_model_len=model.card.max_model_len,
            token_strs=strings,
        )
        return json_response(answer)

    return await call.in_thread(work)


async def _tei_tokens(call: Call[TokenizeRequest], inputs: str | list[str]) -> Response:
    """The tokens of each text with their places in it, as TEI answers."""
    body, settings = call.body, call.gateway.settings
    texts = [inputs] if isinstance(inputs, str) else inputs
    _check_inputs(texts, settings)
    model = call.gateway.table.choose(body.model)
    prompt = _prompt_of(body, model.card)
    tokenizer = await model.tokenizer(call.gateway.pool)
    special = body.add_special_tokens is not False

    def work() -> Response:
        whole = [prompt + text for text in texts]
        encodings = tokenizer.encode_with_offsets(whole, add_special_tokens=special)
        pairs = zip(whole, encodings, strict=True)
        return json_response([simple_tokens(text, encoding) for text, encoding in pairs])

    return await call.in_thread(work)


def simple_tokens(text: str, encoding: Encoding) -> list[SimpleToken]:
    """The tokens of a text: special ones by their names, the others by what stands in the text."""
    rows = zip(
        encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True
    )
    return [
        SimpleToken(id=i, text=name, special=True, start=None, stop=None)
        if special
        else SimpleToken(id=i, text=text[start:stop], special=False, start=start, stop=stop)
        for i, name, special, (start, stop) in rows
    ]


def _check_inputs(texts: list[str], settings: GatewaySettings) -> None:
    if not texts:
        raise bad_request("'inputs' is an empty list.", "inputs")
    if len(texts) > settings.max_inputs:
        message = f"'inputs' has {len(texts)} items; at most {settings.max_inputs} a request."
        raise bad_request(message, "inputs")
    chars = sum(map(len, texts))
    most = settings.max_tokenize_chars // PLACES_SHARE
    if chars > most:
        message = f"'inputs' has {chars} characters; at most {most} are tokenised."
        raise bad_request(message, "inputs")


def _prompt_of(body: TokenizeRequest, card: ModelCard) -> str:
    if body.prompt_name is None:
        return ""
    if card.embedding is None:
        raise bad_request("This model has no prompts.", "prompt_name")
    return choose_prompt(EmbeddingRequest(prompt_name=body.prompt_name), card.embedding)


def _check_forms(body: TokenizeRequest) -> None:
    """Refuses a request with more or less than one thing to tokenise."""
    given = [name for name in _FORMS if getattr(body, name) is not None]
    if not given:
        raise bad_request("'prompt' is missing.", "prompt")
    if len(given) > 1:
        raise bad_request(f"Give '{given[0]}' or '{given[1]}', not both.", given[1])


def _source_of(
    body: TokenizeRequest, card: ModelCard, max_chars: int
) -> tuple[Callable[[], str], bool]:
    """What makes the text, off the event loop, and whether it gets special tokens."""
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        return lambda: _conversation(chat, card, max_chars), bool(body.add_special_tokens)
    name = "text" if body.prompt is None else "prompt"
    text = getattr(body, name)
    _check_chars(name, text, max_chars)
    return lambda: text, body.add_special_tokens is not False


def _conversation(chat: ChatRequest, card: ModelCard, max_chars: int) -> str:
    """The prompt of a conversation, as a chat completion has it."""
    forced_call(chat, card)  # checks the tools
    turns = turns_of(chat, card)
    for i, turn in enumerate(turns):
        _check_chars(f"messages[{i}]", turn["content"], max_chars)
    text = render_turns(chat, turns, card)
    _check_chars("messages", text, max_chars)
    return text


def _check_chars(name: str, text: str, most: int) -> None:
    if len(text) > most:
        message = f"'{name}' has {len(text)} characters; at most {most} are tokenised."
        raise bad_request(message, name)


async def detokenize(call: Call[DetokenizeRequest]) -> Response:
    """The text of token ids."""
    body = call.body
    if body.tokens is None:
        raise bad_request("'tokens' is missing.", "tokens")
    model = call.gateway.table.choose(body.model)
    size = model.card.vocab_size
    ids, skip = body.tokens, bool(body.skip_special_tokens)
    check_size("tokens", [ids], call.gateway.settings)
    tokenizer = await model.tokenizer(call.gateway.pool)

    def work() -> str:
        if ids:
            check_ids("tokens", ids, size)
        return tokenizer.decode(ids, skip_special_tokens=skip)

    text = await call.in_thread(work)
    return json_response(DetokenizeAnswer(prompt=text, text=text))


def check_size(field: str, rows: Iterable[Sized], settings: GatewaySettings) -> None:
    """Refuses more token ids than are turned into text at a time.

    Raises:
        ApiError: 400.
    """
    count, most = sum(map(len, rows)), settings.max_tokenize_chars
    if count > most:
        message = f"'{field}' has {count} token ids; at most {most} are turned into text."
        raise bad_request(message, field)


OPERATIONS = (
    Operation(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        summary="Turn a text into token ids",
        tag="Tokens",
        body=TokenizeRequest,
        answer=TokenizeAnswer | list[list[SimpleToken]],
        description="`prompt` or `text` for one text's ids, `messages` for those of a "
        "conversation; `inputs` for the answer of TEI.",
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
