"""From what a late-interaction checkpoint says in words to token ids. Free of torch."""

from typing import TYPE_CHECKING, cast

from tokenizers import Tokenizer

from rose.models.card import LateInteraction, QueryExpansion, Side
from rose.models.config import CheckpointFolder, Setting
from rose.models.errors import CheckpointError
from rose.models.tokenizer import read_tokenizer_card, read_tokenizer_json

if TYPE_CHECKING:
    from rose.models.recipe_late import Expansion, LateSettings, Marker


def resolve(
    stated: "LateSettings", core: CheckpointFolder, vocab_size: int, limit: Setting, *, option: bool
) -> tuple[LateInteraction, list[str]]:
    """Find the ids of markers, of the token to fill queries with, and of words to leave out.

    Args:
        stated: what the checkpoint says.
        core: the folder of the backbone, with the tokenizer.
        vocab_size: rows of the token embedding.
        limit: the longest text.
        option: whether the command line says so, which then goes for documents.

    Returns:
        The facts for the card, and warnings.

    Raises:
        CheckpointError: a token is not there, or queries are filled beyond the limit.
    """
    vocabulary = _Vocabulary(core, vocab_size)
    expansion = _expansion(stated.expansion, vocabulary, core, limit)
    wanted = stated.document_length
    document = limit.value if option or wanted is None else min(wanted, limit.value)
    query = limit.value
    if stated.expansion is not None and stated.expansion.fixed:
        query = stated.expansion.length
    elif stated.query_length is not None:
        floor = expansion.length if expansion else 1
        query = min(max(stated.query_length, floor), limit.value)
    found = {word: vocabulary.get(word) for word in stated.skip_words}
    lost = " ".join(word for word, token in found.items() if token is None)
    facts = LateInteraction(
        query_length=query,
        document_length=document,
        query_marker=vocabulary.marker(stated.query_marker),
        document_marker=vocabulary.marker(stated.document_marker),
        expansion=expansion,
        skip_ids=tuple(token for token in found.values() if token is not None),
        skip_sides=cast("tuple[Side, ...]", stated.skip_sides),
        mean=stated.mean,
    )
    warning = f"skiplist_words: no tokens of this tokenizer, so not left out: {lost}"
    return facts, [warning] if lost else []


def late_settings(facts: LateInteraction, stated: "LateSettings") -> list[Setting]:
    """Show what queries and documents become."""
    shown: list[Setting] = []
    for side, marker in (("query", stated.query_marker), ("document", stated.document_marker)):
        if marker is not None:
            token = facts.marker(cast("Side", side))
            source = marker.where.rpartition("/")[2]
            shown.append(Setting(f"{side} marker", f"{marker.text!r} (token {token})", source))
    shown.append(Setting("query length", facts.query_length, stated.lengths_file.split(":")[0]))
    shown.append(Setting("document length", facts.document_length, stated.lengths_file))
    if facts.expansion is not None and stated.expansion is not None:
        seen = "seen" if facts.expansion.attend else "not seen"
        value = (
            f"to {facts.expansion.length} tokens with token {facts.expansion.token}, {seen} by "
            "the others"
        )
        source = stated.expansion.where.rpartition("/")[2]
        shown.append(Setting("query expansion", value, source))
    return shown


class _Vocabulary:
    """The tokens that the model has a row for."""

    def __init__(self, core: CheckpointFolder, size: int) -> None:
        self._tokenizer = Tokenizer.from_str(read_tokenizer_json(core).decode())
        self._size = size
        self._file = core.path / "tokenizer.json"

    def get(self, text: str) -> int | None:
        token: int | None = self._tokenizer.token_to_id(text)
        return token if token is not None and token < self._size else None

    def marker(self, marker: "Marker | None") -> int | None:
        """The id of a marker.

        Raises:
            CheckpointError: the tokenizer or the model has no such token.
        """
        return None if marker is None else self.token(marker.text, marker.where)

    def ends_in(self, token: int) -> bool:
        """Whether the tokenizer puts this token at the end of texts."""
        return [token] == self._tokenizer.encode("").ids[-1:]

    def token(self, text: str, where: str) -> int:
        found = self.get(text)
        if found is None:
            raise CheckpointError(
                f"{where}: {text!r} is no token of {self._file}, or beyond the {self._size} rows "
                "of the token embedding"
            )
        return found


def _expansion(
    stated: "Expansion | None", vocabulary: _Vocabulary, core: CheckpointFolder, limit: Setting
) -> QueryExpansion | None:
    if stated is None:
        return None
    if stated.length > limit.value:
        raise CheckpointError(
            f"{stated.where}: queries are filled up to {stated.length} tokens, max_model_len is "
            f"{limit.value} ({limit.source})"
        )
    text = stated.token
    if text is None:
        special = read_tokenizer_card(core).special_tokens
        text = special.get("mask_token") or special.get("eos_token")
    if text is None:
        raise CheckpointError(
            f"{stated.where}: the tokenizer of {core.path} has neither a mask token nor an end "
            "token to fill queries with"
        )
    token = vocabulary.token(text, stated.where)
    if not stated.attend and vocabulary.ends_in(token):
        raise CheckpointError(
            f"{stated.where}: queries end in {text!r} already, so what they are filled with cannot "
            "be told from it: not supported"
        )
    return QueryExpansion(token=token, length=stated.length, attend=stated.attend)
