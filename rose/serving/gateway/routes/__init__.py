"""The routes of the API. A new module of them is one line here."""

from rose.serving.gateway.operation import Operation
from rose.serving.gateway.routes import (
    chat,
    classify,
    completions,
    contextual,
    embeddings,
    models,
    rerank,
    score,
    service,
    tei,
    tokens,
)

OPERATIONS: tuple[Operation, ...] = (
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *embeddings.OPERATIONS,
    *contextual.OPERATIONS,
    *rerank.OPERATIONS,
    *score.OPERATIONS,
    *classify.OPERATIONS,
    *models.OPERATIONS,
    *tei.OPERATIONS,
    *tokens.OPERATIONS,
    *service.OPERATIONS,
)
