"""How long a text may be, and what happens to one that is longer."""

from dataclasses import dataclass
from typing import Literal, Protocol

from rose.models.card import ModelCard
from rose.serving.gateway.errors import ApiError, bad_request
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.tokenization import Ids, Side, Tokenizer

LONG = "context_length_exceeded"
MAX_PROMPT_CHARS = 1 << 25  # before all texts of a request, as much as a body has at most


class CutFields(Protocol):
    """The fields of a request that say what happens to long texts."""

    @property
    def truncate(self) -> bool | Literal["NONE", "START", "END"] | None:
        """Whether they are cut, and where."""

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """How long they may be."""

    @property
    def truncation_side(self) -> Side | None:
        """Where they are cut."""


@dataclass(frozen=True)
class Limit:
    """The rule of one request.

    Attributes:
        tokens: Most tokens of a text, special tokens and prompt included.
        cut: Whether longer texts are cut; else they are refused.
        side: Where they are cut.
        field: The request field that says so.
    """

    tokens: int
    cut: bool
    side: Side
    field: str

    def check_room(self, fixed: int) -> None:
        """Refuses a limit that leaves nothing of a text: `fixed` tokens are not of the text.

        Raises:
            ApiError: 400.
        """
        if self.cut and self.tokens <= fixed:
            message = (
                f"Texts cannot be cut to {self.tokens} tokens: "
                f"special tokens and prompt take {fixed}."
            )
            raise bad_request(message, self.field)
        if fixed > self.tokens:
            message = f"Special tokens and prompt take {fixed} tokens; the limit is {self.tokens}."
            raise bad_request(message, "prompt", LONG)

    def check_prompt(self, prompt: str, texts: int, tokenizer: Tokenizer) -> None:
        """Refuses a prompt that no text fits behind, or that makes too much of many texts.

        A small request could ask for much work: its prompt is read once more with every text.

        Raises:
            ApiError: 400.
        """
        if tokenizer.certainly_longer(prompt, self.tokens):
            found = f"more than {2 * self.tokens} tokens"
            raise bad_request(f"'prompt' has {found}; the limit is {self.tokens}.", "prompt", LONG)
        if len(prompt) * texts > MAX_PROMPT_CHARS:
            message = (
                f"'prompt' of {len(prompt)} characters before each of {texts} texts makes more "
                f"than {MAX_PROMPT_CHARS}."
            )
            raise bad_request(message, "prompt")

    def check_length(self, place: str, text: str, tokenizer: Tokenizer) -> None:
        """Refuses, without tokenising it all, a long text that is certainly too long.

        Raises:
            ApiError: 400, naming `place`.
        """
        if not self.cut and tokenizer.certainly_longer(text, self.tokens):
            raise self.too_long(place, f"more than {2 * self.tokens} tokens")

    def fit(
        self, place: str, ids: Ids, tokenizer: Tokenizer, keep: int = 0, keep_tail: int = 0
    ) -> Ids:
        """The ids of a text, cut if need be; see `Tokenizer.cut` for `keep` and `keep_tail`.

        Raises:
            ApiError: 400, naming `place`.
        """
        if len(ids) <= self.tokens:
            return ids
        if not self.cut:
            raise self.too_long(place, f"{len(ids)} tokens")
        return tokenizer.cut(ids, self.tokens, self.side, keep, keep_tail)

    def too_long(self, place: str, found: str) -> ApiError:
        """The error of a text, with what was found of it: "513 tokens"."""
        message = (
            f"'{place}' has {found}; the limit is {self.tokens}. "
            "Shorten it, or send 'truncate': true."
        )
        return bad_request(message, place, LONG)


_SIDES: dict[object, Side] = {"START": "left", "END": "right"}


def limit_of(body: CutFields, card: ModelCard, settings: GatewaySettings) -> Limit:
    """The rule that a request asks for.

    Raises:
        ApiError: 400, fields contradict each other or are out of range.
    """
    side = body.truncation_side or _SIDES.get(body.truncate) or card.tokenizer.truncation_side
    refuses = body.truncate in (False, "NONE")
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        cut = settings.truncate if body.truncate is None else not refuses
        return Limit(card.max_model_len, cut, side, "truncate")
    field = "truncate_prompt_tokens"
    if refuses:
        raise bad_request(f"'{field}' contradicts 'truncate'.", field)
    if wanted == 0 or wanted > card.max_model_len:
        message = f"'{field}' is {wanted}; possible: 1 to {card.max_model_len}, or -1."
        raise bad_request(message, field)
    return Limit(card.max_model_len if wanted == -1 else wanted, True, side, field)
