"""Text to token ids, as `transformers` does it, without transformers and off the event loop.

A `Tokenizer` is set up once and never changed afterwards, so threads share it. Truncation is done
here on ids and not by the library, whose truncation is a setting of the shared object.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import normalizers

from rose.models.card import ModelCard, TokenizerCard
from rose.serving.gateway.pair_layout import PairLayout, find_pair_layout
from rose.serving.gateway.unigram.checked import fast_encoder

Side = Literal["left", "right"]
Ids = npt.NDArray[np.int32]

# Texts go to the library in groups of about this many characters: an encoding takes some hundred
# bytes a token until its ids are taken out of it.
GROUP_CHARS = 1 << 20
# A text longer than this is measured piece by piece before it is tokenised as a whole.
PIECE_CHARS = 1 << 16
# Tokens near a piece's end may differ from those of the whole text; so many are never relied on.
MARGIN_TOKENS = 256


class TokenizationError(ValueError):
    """The tokenizer cannot be used as it is, or failed on a text."""


class TextError(TokenizationError):
    """A text that no tokens stand for: it is no Unicode, or the vocabulary cannot write it."""


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        prefix: Special tokens that the tokenizer puts before a text, int32.
        suffix: Special tokens that it puts after a text, int32.
    """

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerCard) -> None:
        backend.no_truncation()
        backend.no_padding()
        if facts.lowercase:
            _lowercase_first(backend)
        backend.encode_special_tokens = facts.split_special
        self._backend = backend
        self._special_ids = _special_ids(backend, facts)
        self.prefix, self.suffix = _template(backend)
        self._unigram = None if facts.split_special else fast_encoder(backend)
        self.prompt_length = lru_cache(maxsize=256)(self._prompt_length)

    @classmethod
    def from_card(cls, card: ModelCard, tokenizer_json: bytes) -> "Tokenizer":
        """Loads the tokenizer that came with a model card.

        Raises:
            TokenizationError: tokenizer.json cannot be read.
        """
        try:
            backend = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise TokenizationError(f"{card.name}: tokenizer.json: {error}") from error
        return cls(backend, card.tokenizer)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, which nobody may change."""
        return self._backend

    @cached_property
    def pair_layout(self) -> PairLayout | None:
        """What stands around two texts that are joined; None if the tokenizer has no such way."""
        return find_pair_layout(self._backend)

    @property
    def encodes_fast(self) -> bool:
        """Whether this project's own code encodes most texts, and not the library."""
        return self._unigram is not None

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Ids]:
        """Token ids of each text, as many as it has. Releases the GIL; uses several cores."""
        found: list[Ids] = []
        for group in _groups(texts):
            found += self._encode_group(group, add_special_tokens)
        return found

    def _encode_group(self, texts: list[str], special: bool) -> list[Ids]:
        if self._unigram is None:
            return self._library_ids(texts, special)
        try:
            found = self._unigram.encode(texts, special=special)
        except UnicodeEncodeError as error:
            raise _half_pair() from error
        left = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        rest = iter(self._library_ids(left, special)) if left else iter(())
        return [next(rest) if ids is None else ids for ids in found]

    def _library_ids(self, texts: list[str], special: bool) -> list[Ids]:
        return [np.array(encoding.ids, np.int32) for encoding in self._encode(texts, special)]

    def encode_with_offsets(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[tokenizers.Encoding]:
        """The library's encodings, which know where in the text each token is."""
        groups = _groups(texts)
        return [e for group in groups for e in self._encode(group, add_special_tokens, fast=False)]

    def encode_ends(self, text: str, limit: int, *, add_special_tokens: bool = True) -> Ids:
        """Token ids of a text that is going to be cut to `limit`: right at both of its ends.

        A text of many megabytes is tokenised in pieces, which takes a tenth of the memory. Its
        first and its last piece alone hold more tokens than can be kept.
        """
        pieces = list(_pieces(text, max(PIECE_CHARS, 16 * limit)))
        if len(text) > GROUP_CHARS and len(pieces) > 1:
            rows = self.encode(pieces, add_special_tokens=False)
            if min(len(rows[0]), len(rows[-1])) > limit + MARGIN_TOKENS:
                if add_special_tokens:
                    rows = [self.prefix, *rows, self.suffix]
                return np.concatenate(rows)
        return self.encode([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids. Releases the GIL, which the library does for batches alone."""
        texts = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry of each id."""
        return [self._backend.id_to_token(i) or "" for i in ids]

    def certainly_longer(self, text: str, limit: int) -> bool:
        """Whether a text has more than `limit` tokens; False also when only a full count can tell.

        A long text is counted in pieces that end at white space, and only until there are twice as
        many tokens as allowed: what a piece's end may do to the count is far less than that.
        """
        if len(text) <= PIECE_CHARS:
            return False
        count = 0
        for piece in _pieces(text, PIECE_CHARS):
            count += len(self.encode([piece], add_special_tokens=False)[0])
            if count > 2 * limit + MARGIN_TOKENS:
                return True
        return False

    def cut(self, ids: Ids, limit: int, side: Side, keep: int = 0, keep_tail: int = 0) -> Ids:
        """At most `limit` of a text's ids: the special tokens stay, the text loses its one side.

        Args:
            ids: int32 [tokens].
            limit: More than there are special tokens.
            side: Where tokens are dropped.
            keep: Leading tokens that stay when the left side is cut (a prompt).
            keep_tail: Trailing tokens that stay when the right side is cut (a template's end).
        """
        if len(ids) <= limit:
            return ids
        head, tail = self._edges(ids)
        tail = min(max(tail, keep_tail), limit)
        if side == "left":
            head = min(max(head, keep), limit)
            return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])
        return np.concatenate([ids[: limit - tail], ids[len(ids) - tail :]])

    def _edges(self, ids: Ids) -> tuple[int, int]:
        """How many special tokens are at either end, if they are those of the tokenizer."""
        head, tail = len(self.prefix), len(self.suffix)
        starts = np.array_equal(ids[:head], self.prefix)
        ends = np.array_equal(ids[len(ids) - tail :], self.suffix)
        return (head if starts else 0), (tail if ends else 0)

    def _prompt_length(self, prompt: str, add_special_tokens: bool = True) -> int:
        """Tokens of a prompt that pooling may leave out, as sentence-transformers counts them.

        That is: the prompt tokenised alone, less one if its last token is a special one.
        """
        ids = self._encode([prompt], add_special_tokens)[0].ids
        return len(ids) - bool(ids and ids[-1] in self._special_ids)

    def _encode(
        self, texts: list[str], special: bool, *, fast: bool = True
    ) -> list[tokenizers.Encoding]:
        encode = self._backend.encode_batch_fast if fast else self._backend.encode_batch
        try:  # only the batch calls release the GIL, also for one text
            return encode(texts, add_special_tokens=special)
        except TypeError as error:  # all that reaches the library is text; this one is no UTF-8
            raise _half_pair() from error
        except BaseException as error:
            if type(error) is Exception:  # the library's own, for a text
                raise TextError(f"The tokenizer cannot read the text: {error}.") from error
            if type(error).__name__ != "PanicException":  # Rust's, no subclass of Exception
                raise
            raise TokenizationError(f"the tokenizer failed: {error}") from error


def _half_pair() -> TextError:
    return TextError("The text holds half of a surrogate pair.")


def _lowercase_first(backend: tokenizers.Tokenizer) -> None:
    """As sentence-transformers does for `do_lower_case`."""
    present = backend.normalizer
    parts: list[normalizers.Normalizer] = []
    if isinstance(present, normalizers.Sequence):
        parts = [present[i] for i in range(len(present))]
    elif present is not None:
        parts = [present]
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


def _special_ids(backend: tokenizers.Tokenizer, facts: TokenizerCard) -> frozenset[int]:
    named = [backend.token_to_id(text) for text in facts.special_tokens.values()]
    if named:
        return frozenset(i for i in named if i is not None)
    return frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)


def _template(backend: tokenizers.Tokenizer) -> tuple[Ids, Ids]:
    """The special tokens before and after a text, found by looking at one."""
    for probe in ("a", "the", "1", "."):
        full = backend.encode(probe)
        bare = backend.encode(probe, add_special_tokens=False).ids
        added = len(full.ids) - len(bare)
        for head in range(added + 1):
            mask = full.special_tokens_mask
            inside = mask[head : head + len(bare)]
            if bare and full.ids[head : head + len(bare)] == bare and not any(inside):
                ids = np.array(full.ids, np.int32)
                return ids[:head], ids[head + len(bare) :]
    raise TokenizationError("cannot tell which special tokens the tokenizer adds to a text")


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    chars = 0
    for text in texts:
        if group and chars + len(text) > GROUP_CHARS:
            yield group
            group, chars = [], 0
        group.append(text)
        chars += len(text)
    if group:
        yield group


def _pieces(text: str, chars: int) -> Iterator[str]:
    """Pieces of about equal length, at least `chars`, cut before white space where there is any."""
    count = max(1, len(text) // chars)
    start = 0
    for i in range(1, count):
        end = len(text) * i // count
        space = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
        end = space if space > (start + end) // 2 else end
        yield text[start:end]
        start = end
    yield text[start:]
