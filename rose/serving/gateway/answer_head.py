"""What all answers of a generation have in common: their envelope and their usage."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rose.models.card import ModelCard
from rose.serving.gateway.choice import Choice
from rose.serving.gateway.generation_input import Plan
from rose.serving.gateway.generation_schemas import GenerationUsage, PromptTokensDetails


@dataclass(frozen=True, slots=True)
class Head:
    """The fields of `Envelope`."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str, card: ModelCard) -> "Head":
        """The head of an answer that starts now; `prefix` is that of its id."""
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model, card.fingerprint)


def usage_of(plan: Plan) -> GenerationUsage:
    """Tokens fed and generated up to now."""
    prompt_tokens = sum(len(prompt.ids) for prompt in plan.prompts)
    completion_tokens = sum(choice.num_tokens for choice in plan.choices)
    return GenerationUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=_cached(plan.choices, plan.n)),
    )


def _cached(choices: Sequence[Choice], n: int) -> int:
    """Cached tokens of the prompts; the later choices of a prompt find what its first left."""
    return sum(choice.cached_tokens for choice in choices[::n])
