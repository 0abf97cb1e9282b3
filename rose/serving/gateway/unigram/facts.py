"""What a Unigram tokenizer consists of, as the `tokenizers` library holds it.

The facts are taken from the loaded parts and not from tokenizer.json: the library's reading of a
score may differ from Python's in the last bit, which decides between pieces of equal scores.
"""

import base64
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import tokenizers
from tokenizers import models
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import PostProcessor

# The only regular expression that is known here: SentencePiece's removal of extra white space.
SPACES = " {2,}"


class Unsupported(Exception):  # noqa: N818
    """Only the library itself can do what this tokenizer does; the message says what."""


@dataclass(frozen=True)
class Replace:
    """A string that another takes the place of; the pattern `SPACES` is a regular expression."""

    pattern: str
    content: str
    regex: bool


@dataclass(frozen=True)
class Charsmap:
    """SentencePiece's precompiled map of characters."""

    blob: bytes


@dataclass(frozen=True)
class Unicode:
    """A normaliser without settings: Nmt or NFKC."""

    name: str


Part = Normalizer | PreTokenizer | PostProcessor | None
Stage = Replace | Charsmap | Unicode


@dataclass(frozen=True)
class UnigramFacts:
    """All that makes up the ids of a text.

    Attributes:
        pieces: The vocabulary; a piece's id is its place.
        scores: One for each piece, all finite.
        unk_id: The piece of what no other piece stands for.
        byte_fallback: Whether bytes stand for it if all of them are pieces.
        stages: The normaliser's steps.
        white_space: Whether words end at white space of every kind.
        mark: The character that stands for a space.
        prepend: Whether a mark is put before every text (or word) that has none.
        split: Whether a word begins at every mark.
        literals: Texts that stand for added tokens and the token's id; -1 where only the library
            knows whether they do (tokens that strip white space, or are looked for behind the
            normaliser).
        prefix: Special tokens before a text.
        suffix: Special tokens after it.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    unk_id: int
    byte_fallback: bool
    stages: list[Stage]
    white_space: bool
    mark: str
    prepend: bool
    split: bool
    literals: dict[str, int]
    prefix: list[int]
    suffix: list[int]


class _Model(msgspec.Struct):
    unk_id: int | None
    vocab: list[tuple[str, float]]
    byte_fallback: bool = False


def read_facts(backend: tokenizers.Tokenizer) -> UnigramFacts:
    """Read a tokenizer's parts.

    Raises:
        Unsupported: it is no Unigram tokenizer, or has a part that is unknown here.
    """
    if not isinstance(backend.model, models.Unigram):
        raise Unsupported("not a Unigram model")
    stages = list(_stages(_state(backend.normalizer)))
    white_space, metaspace = _pre_tokenizer(_state(backend.pre_tokenizer))
    prefix, suffix = _template(_state(backend.post_processor))
    model = _model(backend)
    assert model.unk_id is not None
    pieces, scores = zip(*model.vocab, strict=True)
    if not all(pieces):
        raise Unsupported("model: an empty piece")
    if not all(map(math.isfinite, scores)):
        raise Unsupported("model: a score that is not finite")
    return UnigramFacts(
        pieces=pieces,
        scores=scores,
        unk_id=model.unk_id,
        byte_fallback=model.byte_fallback,
        stages=stages,
        white_space=white_space,
        mark=metaspace["replacement"],
        prepend=metaspace["prepend_scheme"] == "always",
        split=metaspace["split"],
        literals=_literals(backend),
        prefix=prefix,
        suffix=suffix,
    )


def _state(part: Part) -> dict[str, Any] | None:
    """A part's settings, all of them, whatever of them tokenizer.json leaves out."""
    state = None if part is None else json.loads(part.__getstate__())
    if state is not None and not isinstance(state, dict):
        raise Unsupported(f"{part!r} has no settings")
    return state


def _model(backend: tokenizers.Tokenizer) -> _Model:
    try:
        model = msgspec.json.decode(backend.model.__getstate__(), type=_Model)
    except msgspec.MsgspecError as error:
        raise Unsupported(f"model: {error}") from error
    if model.unk_id is None:
        raise Unsupported("model: no unk_id")
    return model


def _stages(normalizer: dict[str, Any] | None) -> Iterator[Stage]:
    match normalizer:
        case None:
            return
        case {"type": "Sequence", "normalizers": list(parts)}:
            for part in parts:
                yield from _stages(part)
        case {"type": "Nmt" | "NFKC" as name}:
            yield Unicode(name)
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if (
            pattern
        ):
            yield Replace(pattern, content, regex=False)
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(content)} if (
            pattern == SPACES
        ):
            yield Replace(pattern, content, regex=True)
        case {"type": "Precompiled", "precompiled_charsmap": str(blob)}:
            yield Charsmap(base64.b64decode(blob))
        case _:
            raise Unsupported(f"normalizer: {_shown(normalizer)}")


def _pre_tokenizer(state: dict[str, Any] | None) -> tuple[bool, dict[str, Any]]:
    """Whether white space splits, and Metaspace's settings."""
    match state:
        case {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, dict(metaspace)]}:
            white_space = True
        case {"type": "Sequence", "pretokenizers": [dict(metaspace)]} | dict(metaspace):
            white_space = False
        case _:
            raise Unsupported("pre_tokenizer: none")
    match metaspace:
        case {"type": "Metaspace", "prepend_scheme": "always" | "never", "split": bool()}:
            return white_space, metaspace
    raise Unsupported(f"pre_tokenizer: {_shown(state)}")


def _template(state: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """Ids before and after a text."""
    match state:
        case None:
            return [], []
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(tokens)}:
            places = [i for i, piece in enumerate(pieces) if "SpecialToken" not in piece]
            if len(places) == 1 and pieces[places[0]]["Sequence"]["id"] == "A":
                ids = [tokens[piece["SpecialToken"]["id"]]["ids"] if "SpecialToken" in piece else []
                       for piece in pieces]  # fmt: skip
                place = places[0]
                return list(chain(*ids[:place])), list(chain(*ids[place:]))
        case {"type": "RobertaProcessing" | "BertProcessing", "cls": [_, int(cls)],
              "sep": [_, int(sep)]}:  # fmt: skip
            return [cls], [sep]
    raise Unsupported(f"post_processor: {_shown(state)}")


def _literals(backend: tokenizers.Tokenizer) -> dict[str, int]:
    if backend.encode_special_tokens:
        raise Unsupported("encode_special_tokens")
    found: dict[str, int] = {}
    for id_, token in backend.get_added_tokens_decoder().items():
        special = token.normalized or token.lstrip or token.rstrip or token.single_word
        found[token.content] = -1 if special else id_
        if token.normalized and backend.normalizer is not None:
            found[backend.normalizer.normalize_str(token.content)] = -1
    found.pop("", None)
    return found


def _shown(state: object) -> str:
    text = json.dumps(state)
    return text if len(text) < 200 else f"{text[:200]} ..."
