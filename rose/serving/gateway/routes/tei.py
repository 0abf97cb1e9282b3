"""The routes of text-embeddings-inference, on top of those of the OpenAI form."""

from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import orjson
from starlette.responses import Response

from rose._version import __version__
from rose.models.card import ModelCard, RowOutput, Task
from rose.serving.client_api import EngineError
from rose.serving.gateway.embedding_input import check_ids
from rose.serving.gateway.errors import ApiError, bad_request, from_engine
from rose.serving.gateway.operation import BODY_ERRORS, Call, Operation
from rose.serving.gateway.routes.embeddings import Embedded, embed, sparse_rows
from rose.serving.gateway.routes.models import json_response
from rose.serving.gateway.routes.tokens import check_size
from rose.serving.gateway.schemas import EmbeddingRequest, SparseValue
from rose.serving.gateway.several_outputs import encode_rows, engine_outputs
from rose.serving.gateway.sparse_output import encode_sparse
from rose.serving.gateway.tei_schemas import (
    DecodeRequest,
    Direction,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    Info,
    SimilarityRequest,
)
from rose.serving.gateway.token_vectors import of_texts


async def embed_texts(call: Call[EmbedRequest]) -> Response:
    """Vectors of texts, as a list of lists."""
    body = call.body
    request = EmbeddingRequest(
        model=body.model,
        input=body.inputs,
        normalize=body.normalize is not False,
        truncate=body.truncate,
        truncation_side=_side(body.truncation_direction),
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
    )
    vectors = (await _embed(call, request, _input_name)).answer.vectors
    content = await call.in_thread(_dump, np.ascontiguousarray(vectors))
    return Response(content, media_type="application/json")


async def embed_all(call: Call[EmbedAllRequest]) -> Response:
    """A vector for each token of texts, special ones too: a list of lists for each text."""
    body = call.body
    model = call.gateway.table.choose(body.model, "embed", doing="embed texts")
    card = model.card.embedding
    default: RowOutput = "multi_vector" if card and card.late else "hidden_states"
    output: RowOutput = body.output or default
    if output == "multi_vector" and (card is None or output not in card.outputs):
        raise bad_request(f"The model '{model.name}' has no vectors of tokens.", "output")
    request = _plain_request(body)
    request.input_type = body.input_type
    done = await _embed(call, request, _input_name, outputs=(output,))
    content = await call.in_thread(_dump_texts, done)
    return Response(content, media_type="application/json")


async def embed_sparse(call: Call[EmbedSparseRequest]) -> Response:
    """Weights of tokens: of the whole vocabulary, or of those in the text."""
    model = call.gateway.table.choose(call.body.model, "embed", doing="embed texts")
    card = model.card.embedding
    if card is None or "sparse" not in card.outputs:
        raise bad_request(f"The model '{model.name}' has no sparse vectors.", "model")
    outputs = engine_outputs(("sparse",), card)
    done = await _embed(call, _plain_request(call.body), _input_name, outputs=outputs, sparse=True)
    content = await call.in_thread(encode_sparse, await sparse_rows(call, done))
    return Response(content, media_type="application/json")


def _plain_request(body: EmbedSparseRequest) -> EmbeddingRequest:
    return EmbeddingRequest(
        model=body.model,
        input=body.inputs,
        truncate=body.truncate,
        truncation_side=_side(body.truncation_direction),
        prompt_name=body.prompt_name,
    )


async def similarity(call: Call[SimilarityRequest]) -> Response:
    """Cosines of one text and others."""
    inputs, parameters = call.body.inputs, call.body.parameters
    if inputs is None:
        raise bad_request("'inputs' is missing.", "inputs")
    if not inputs.sentences:
        raise bad_request("'inputs.sentences' is an empty list.", "inputs.sentences")
    request = EmbeddingRequest(
        model=call.body.model,
        input=[inputs.source_sentence, *inputs.sentences],
        normalize=True,
        truncate=parameters.truncate if parameters else None,
        truncation_side=_side(parameters.truncation_direction if parameters else None),
        prompt_name=parameters.prompt_name if parameters else None,
    )
    vectors = (await _embed(call, request, _sentence_name)).answer.vectors.astype(np.float32)
    return Response(_dump(vectors[1:] @ vectors[0]), media_type="application/json")


async def decode(call: Call[DecodeRequest]) -> Response:
    """The texts of token ids."""
    body = call.body
    if not body.ids:
        raise bad_request("'ids' is missing or empty.", "ids")
    model = call.gateway.table.choose(body.model)
    rows = _rows(body.ids)
    check_size("ids", rows.values(), call.gateway.settings)
    size = model.card.vocab_size
    tokenizer = await model.tokenizer(call.gateway.pool)
    skip = body.skip_special_tokens is not False

    def work() -> list[str]:
        for place, row in rows.items():
            if row:
                check_ids(place, row, size)
        return [tokenizer.decode(row, skip_special_tokens=skip) for row in rows.values()]

    return Response(orjson.dumps(await call.in_thread(work)), media_type="application/json")


async def info(call: Call[None]) -> Response:
    """What serves the embeddings, or else ranks or classifies, and its limits."""
    settings, table = call.gateway.settings, call.gateway.table
    tasks: tuple[Task, ...] = ("score", "classify")
    if table.can("embed") or not table.can(*tasks):
        tasks = ("embed",)
    model = table.choose(None, *tasks, doing="embed texts")
    card = model.card
    answer = Info(
        model_id=model.name,
        model_dtype=card.dtype,
        model_type=_model_type(card),
        max_input_length=card.max_model_len,
        max_client_batch_size=settings.max_inputs,
        max_concurrent_requests=settings.max_concurrent_requests,
        version=__version__,
    )
    return json_response(answer)


def _model_type(card: ModelCard) -> dict[str, dict[str, Any]]:
    if card.embedding is not None:
        return {"embedding": {"pooling": card.embedding.pooling}}
    assert card.scoring is not None
    labels = {str(index): label for index, label in enumerate(card.scoring.labels)}
    ids = {label: index for index, label in enumerate(card.scoring.labels)}
    kind = "reranker" if "score" in card.tasks else "classifier"
    return {kind: {"id2label": labels, "label2id": ids}}


def _rows(ids: list[int | list[int]]) -> dict[str, list[int]]:
    """The rows of ids, each under its place in the request."""
    if all(isinstance(item, int) for item in ids):
        return {"ids": cast("list[int]", ids)}
    for i, item in enumerate(ids):
        if isinstance(item, int):
            raise bad_request("'ids' mixes token ids and lists of token ids.", f"ids[{i}]")
    return {f"ids[{i}]": cast("list[int]", row) for i, row in enumerate(ids)}


def _side(direction: Direction | None) -> Literal["left", "right"] | None:
    return cast("Literal['left', 'right']", direction.lower()) if direction else None


async def _embed(
    call: Call[Any],
    request: EmbeddingRequest,
    name_of: Callable[[str], str],
    *,
    outputs: tuple[RowOutput, ...] = ("text",),
    sparse: bool = False,
) -> Embedded:
    """Runs a request, and names the fields in its errors as the route does."""
    try:
        return await embed(call, request, outputs=outputs, sparse=sparse)
    except EngineError as error:
        failed = from_engine(error)
        raise failed.renamed(name_of(failed.param)) if failed.param else failed from error
    except ApiError as error:
        raise error.renamed(name_of(error.param)) if error.param else error from None


def _input_name(param: str) -> str:
    names = {"truncation_side": "truncation_direction"}
    is_text = param == "input" or param.startswith("input[")
    return f"inputs{param.removeprefix('input')}" if is_text else names.get(param, param)


def _sentence_name(param: str) -> str:
    if param == "input":
        return "inputs.sentences"
    if not param.startswith("input["):
        return f"parameters.{param}" if param != "model" else param
    place = int(param.removeprefix("input[").partition("]")[0])
    return f"inputs.sentences[{place - 1}]" if place else "inputs.source_sentence"


def _dump_texts(done: Embedded) -> bytes:
    """A list of rows for each text."""
    if done.outputs == ("multi_vector",):
        texts = done.token_vectors()
    else:
        texts = of_texts(done.answer.vectors, done.work.ids)
    return b"[" + b",".join(map(encode_rows, texts)) + b"]"


def _dump(array: Any) -> bytes:  # noqa: ANN401 - numpy arrays of any dtype
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


OPERATIONS = (
    Operation(
        method="POST",
        path="/embed",
        handler=embed_texts,
        summary="Embed texts, the TEI way",
        tag="TEI",
        body=EmbedRequest,
        answer=list[list[float]],
        example={"inputs": ["a red kite over the hill"]},
        statuses=BODY_ERRORS,
    ),
    Operation(
        method="POST",
        path="/embed_all",
        handler=embed_all,
        summary="Embed each token of texts",
        description="The model's hidden states, neither pooled nor normalised; or, with `output`, "
        "the vectors that a model makes of its tokens to be compared one by one. Those are what a "
        "late-interaction model (ColBERT) gives without being asked.",
        tag="TEI",
        body=EmbedAllRequest,
        answer=list[list[list[float]]],
        example={"inputs": ["a red kite over the hill"]},
        statuses=BODY_ERRORS,
    ),
    Operation(
        method="POST",
        path="/embed_sparse",
        handler=embed_sparse,
        summary="Weigh the tokens of texts",
        description="For models with sparse vectors (SPLADE, BGE-M3): the tokens with a weight.",
        tag="TEI",
        body=EmbedSparseRequest,
        answer=list[list[SparseValue]],
        example={"inputs": ["a red kite over the hill"]},
        statuses=BODY_ERRORS,
    ),
    Operation(
        method="POST",
        path="/similarity",
        handler=similarity,
        summary="Compare a text with others",
        tag="TEI",
        body=SimilarityRequest,
        answer=list[float],
        example={"inputs": {"source_sentence": "a red kite", "sentences": ["a bird", "green tea"]}},
        statuses=BODY_ERRORS,
    ),
    Operation(
        method="POST",
        path="/decode",
        handler=decode,
        summary="Turn token ids into texts",
        tag="TEI",
        body=DecodeRequest,
        answer=list[str],
        example={"ids": [101, 2417, 20497, 102]},
        statuses=BODY_ERRORS,
    ),
    Operation(
        method="GET",
        path="/info",
        handler=info,
        summary="What serves the embeddings",
        tag="TEI",
        answer=Info,
        statuses=(400, 503),
    ),
)
