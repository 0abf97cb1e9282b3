"""The routes of the API. A new module of them is one line here."""

from rose.serving.gateway.operation import Operation
from rose.serving.gateway.routes import embeddings, models, service, tokens

OPERATIONS: tuple[Operation, ...] = (
    *embeddings.OPERATIONS,
    *models.OPERATIONS,
    *tokens.OPERATIONS,
    *service.OPERATIONS,
)
