"""The routes of the API. A new module of them is one line here."""

from rose.serving.gateway.operation import Operation
from rose.serving.gateway.routes import chat, completions, embeddings, models, service, tei, tokens

OPERATIONS: tuple[Operation, ...] = (
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *embeddings.OPERATIONS,
    *models.OPERATIONS,
    *tei.OPERATIONS,
    *tokens.OPERATIONS,
    *service.OPERATIONS,
)
