"""Which models a gateway serves, and the tokenizer of each."""

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field

from rose.models.card import EmbeddingCard, ModelCard, ScoringCard, Task
from rose.serving.client_api import EngineClient
from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.schemas import ModelInfo
from rose.serving.gateway.tokenization import TokenizationError, Tokenizer

LOOK_S = 0.5  # between looks for engines that have come
# Where a task is asked for.
ENDPOINTS: dict[Task, str] = {
    "embed": "/v1/embeddings",
    "generate": "/v1/chat/completions, /v1/completions",
    "score": "/v1/rerank, /v1/score",
    "classify": "/v1/classify",
}
BY_COSINE = " With the server's option --rank-by-cosine embedders rank too."


@dataclass
class ServedModel:
    """A model under the name that clients use."""

    name: str
    client: EngineClient
    _loaded: tuple[str, Tokenizer] | None = None
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def card(self) -> ModelCard:
        """The model's card.

        Raises:
            ApiError: 503, the engine has not started yet.
        """
        card = self.client.card
        if card is None:
            raise self.unavailable()
        return card

    def unavailable(self) -> ApiError:
        """The answer while the engine does not take work."""
        reason = self.client.unready_reason or "its engine does not answer"
        return ApiError(503, f"Model '{self.name}' is not ready: {reason}.", code="unavailable")

    async def tokenizer(self, pool: Executor) -> Tokenizer:
        """The tokenizer; loaded on first use, and again if the engine comes back with another.

        Raises:
            ApiError: 503, the engine has not started yet; 500, its tokenizer is unusable.
        """
        fingerprint = self.card.fingerprint
        if self._loaded is None or self._loaded[0] != fingerprint:
            async with self._loading:
                await self._load(pool)
        assert self._loaded is not None
        return self._loaded[1]

    async def _load(self, pool: Executor) -> None:
        card = self.card
        if self._loaded is not None and self._loaded[0] == card.fingerprint:
            return
        loop = asyncio.get_running_loop()
        source = self.client.tokenizer_json
        try:
            tokenizer = await loop.run_in_executor(pool, Tokenizer.from_card, card, source)
        except TokenizationError as error:
            raise ApiError(500, str(error), code="internal") from error
        self._loaded = card.fingerprint, tokenizer

    def info(self) -> ModelInfo:
        """The model as /v1/models lists it."""
        card = self.client.card
        if card is None:
            return ModelInfo(id=self.name, ready=False)
        embedding = card.embedding
        return ModelInfo(
            id=self.name,
            created=card.created,
            ready=self.client.ready,
            task=card.tasks[0] if card.tasks else None,
            tasks=list(card.tasks),
            max_model_len=card.max_model_len,
            dimensions=embedding.dimensions if embedding else None,
            dtype=card.dtype,
            quantization=card.quantization,
            architecture=card.architecture,
            prompts=sorted({*_prompts(embedding), *_prompts(card.scoring)}),
            labels=list(card.scoring.labels) if card.scoring else [],
            output_types=list(embedding.outputs) if embedding else [],
        )


def _endpoints(task: Task, card: ModelCard) -> str:
    if task == "embed" and card.embedding and card.embedding.outputs == ("sparse",):
        return "/embed_sparse"
    return ENDPOINTS[task]


def _hint(tasks: tuple[Task, ...], cards: list[ModelCard]) -> str:
    """How else a model could rank, where that was asked."""
    able = any(card.embedding and "dense" in card.embedding.outputs for card in cards)
    return BY_COSINE if able and tasks == ("score",) else ""


def _prompts(facts: EmbeddingCard | ScoringCard | None) -> dict[str, str]:
    return facts.prompts if facts else {}


class ModelTable:
    """Served models by name; several names may lead to one client."""

    def __init__(self, clients: Mapping[str, EngineClient]) -> None:
        self._models = {name: ServedModel(name, client) for name, client in clients.items()}
        self.unnamed: dict[str, EngineClient] = {}
        """Engines, by address, whose models are not known yet: they have not answered so far."""

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def add(self, name: str, client: EngineClient) -> None:
        """Serves one more model."""
        self._models[name] = ServedModel(name, client)

    async def keep_loaded(self, pool: Executor) -> None:
        """Load the tokenizer of each model once its engine is there, until cancelled.

        So that no request has to wait for it; what is wrong with it is told to those that need it.
        """
        seen: dict[str, str] = {}
        while True:
            for model in list(self):
                card = model.client.card
                if card is not None and seen.get(model.name) != card.fingerprint:
                    seen[model.name] = card.fingerprint
                    with suppress(ApiError):
                        await model.tokenizer(pool)
            await asyncio.sleep(LOOK_S)

    def unready_reasons(self) -> list[str]:
        """Why not every model takes work; empty if all do."""
        unnamed = [
            f"The engine at {address} has not told yet what it serves: {client.unready_reason}."
            for address, client in self.unnamed.items()
        ]
        return [model.unavailable().message for model in self if not model.client.ready] + unnamed

    def _check_all_known(self) -> None:
        """Raises 503 while a model may be served that is not known yet."""
        if self.unnamed:
            raise ApiError(503, " ".join(self.unready_reasons()), code="unavailable")

    def named(self, name: str) -> ServedModel:
        """The model of a name.

        Raises:
            ApiError: 404, listing the names; 503 while not all names are known.
        """
        model = self._models.get(name)
        if model is None:
            self._check_all_known()
            known = ", ".join(f"'{known}'" for known in self._models) or "none"
            message = f"The model '{name[:200]}' is not served here; served: {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    def choose(self, name: str | None, *tasks: Task, doing: str = "do this") -> ServedModel:
        """The model for a request, ready to work.

        Args:
            name: As the request says; None picks the only model that can do it.
            tasks: Of which it must be able to do one; none: any model will do.
            doing: What that is, for messages.

        Raises:
            ApiError: 400, 404 or 503.
        """
        model = self._only(tasks, doing) if name is None else self.named(name)
        if not model.client.ready:
            raise model.unavailable()
        if tasks and not set(tasks) & set(model.card.tasks):
            can = ", ".join(f"{task} ({_endpoints(task, model.card)})" for task in model.card.tasks)
            message = f"The model '{model.name}' cannot {doing}; it can: {can}."
            raise bad_request(message + _hint(tasks, [model.card]), "model")
        return model

    def can(self, *tasks: Task) -> bool:
        """Whether a model that has started can do one of these."""
        cards = [model.client.card for model in self]
        return any(card is not None and bool(set(tasks) & set(card.tasks)) for card in cards)

    def _only(self, tasks: tuple[Task, ...], doing: str) -> ServedModel:
        """The one model (whatever its names) that can do a task, or may once it has started."""
        fit: dict[int, ServedModel] = {}
        for model in self:
            card = model.client.card
            if card is None or not tasks or set(tasks) & set(card.tasks):
                fit.setdefault(id(model.client), model)
        if len(fit) == 1:
            return next(iter(fit.values()))
        self._check_all_known()
        names = ", ".join(f"'{name}'" for name in self._models) or "none"
        if not fit:
            able = ", ".join(f"'{model.name}' ({', '.join(model.card.tasks)})" for model in self)
            message = f"No served model can {doing}; served: {able or 'none'}."
            cards = [model.card for model in self]
            raise bad_request(message + _hint(tasks, cards), "model")
        raise bad_request(f"'model' is missing; served: {names}.", "model")
