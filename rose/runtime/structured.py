"""Output that follows a JSON schema: which tokens a grammar allows next.

Grammars are llguidance's. What overlap means for them: the tokens allowed at a step follow from
the token of the step before, so a sequence with a grammar cannot be scheduled ahead of its last
token (`SamplingState.needs_last_token`); its neighbours can. `GrammarMatcher.advance` computes
the next mask as soon as a token is known. llguidance works outside the GIL, so a pool of threads
can advance the matchers of a batch while the loop goes on with other work.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from rose.runtime.errors import RequestError
from rose.runtime.sampling_plan import Words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FIELD = "response_format"
STUCK = "the output cannot go on under the JSON schema"
UNUSABLE = "the JSON schema cannot be used"
MAX_SCHEMA_CHARS = 100_000
# Space between JSON tokens: one blank, or a line break and its indentation. Were it unbounded, a
# small model could write nothing else up to its last token.
WHITESPACE = r"[ ]?|\n[ \t]{0,32}"


class GrammarCompiler:
    """Turns JSON schemas into matchers for one tokenizer. Threads may share it.

    The first schema takes about a second more: the library reads the tokenizer then.

    Args:
        tokenizer_json: the content of tokenizer.json.
        vocab_size: width of the logits; ids that the tokenizer does not know are never allowed.
        eos_ids: end tokens; they are allowed where the output is complete.
        capacity: compiled grammars to keep.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        capacity: int = 64,
    ) -> None:
        """Keep what is needed; no work is done before the first schema."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._capacity = capacity
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, schema: str) -> "GrammarMatcher":
        """Start to match one output. A large new schema takes seconds: call it from a thread.

        Args:
            schema: a JSON schema as text; "{}" and "true" allow any JSON value.

        Raises:
            RequestError: the schema is malformed, asks for what the library cannot do, or no
                output could follow it; or the library is missing, or cannot use the tokenizer.
        """
        with self._lock:
            found = self._compiled.get(schema)
        if found is None:
            found = self._compile(schema)
        with self._lock:
            self._keep(schema, found)
            return GrammarMatcher(found.deep_copy(), self._vocab_size, self._eos_ids)

    def _keep(self, schema: str, compiled: "LLMatcher") -> None:
        self._compiled[schema] = compiled
        self._compiled.move_to_end(schema)
        while len(self._compiled) > self._capacity:
            self._compiled.popitem(last=False)

    def _compile(self, schema: str) -> "LLMatcher":
        """Compile outside the lock: a large schema must not keep the others waiting."""
        library = _library()
        source = _source(library, schema)
        limits = library.LLParserLimits(verbose_errors=False)
        tokenizer = self._get_tokenizer(library)
        with _refusing(UNUSABLE):
            matcher: LLMatcher = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some faults show only now
        if matcher.is_error():
            raise RequestError(f"{UNUSABLE}: {_reason(matcher.get_error())}", FIELD)
        return matcher

    def _get_tokenizer(self, library: ModuleType) -> "LLTokenizer":
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer(library)
            return self._tokenizer

    def _read_tokenizer(self, library: ModuleType) -> "LLTokenizer":
        data = json.loads(self._tokenizer_json)
        data["padding"] = data["truncation"] = None
        words = max(self._vocab_size, _largest_id(data) + 1)
        with _refusing("structured output does not work with this model's tokenizer"):
            tokenizer: LLTokenizer = library.LLTokenizer(
                json.dumps(data), n_vocab=words, eos_token=self._eos_ids
            )
        return tokenizer


class GrammarMatcher:
    """The place of one output in its grammar. One thread at a time may use it."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, eos_ids: Iterable[int]) -> None:
        """Start at the beginning of the output."""
        self._matcher = matcher
        self._eos_ids = frozenset(eos_ids)
        self._words = (vocab_size + 31) // 32
        self._mask: Words | None = None
        self.is_finished = False

    def mask(self) -> Words:
        """Which tokens may come next: int32 [W], bit i of word w stands for the id 32 w + i.

        Where the output is complete, and only there, the end tokens are among them.

        Raises:
            RequestError: the grammar became too complex for the library at this place.
        """
        if self._mask is None:
            with _refusing(STUCK):
                bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
            self._check()
            self._mask = bits[: self._words]
        return self._mask

    def accept(self, token_id: int) -> None:
        """Go on past a token, which the mask allowed.

        Raises:
            RequestError: the grammar does not allow the token.
        """
        self._mask = None
        with _refusing(STUCK):
            self._matcher.consume_token(token_id)
        self._check()
        self.is_finished = token_id in self._eos_ids

    def advance(self, token_id: int) -> None:
        """Accept a token and compute the next mask, for a thread to run ahead of the step."""
        self.accept(token_id)
        if not self.is_finished:
            self.mask()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"{STUCK}: {self._matcher.get_error()}", FIELD)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn what the library raises into an error of the request.

    Faults of its own are panics, which are no `Exception` and would end the engine.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise RequestError(f"{what}: {error}", FIELD) from error
        raise


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        message = "structured output needs the extra 'structured': rose-engine[structured]"
        raise RequestError(message, FIELD) from error
    module: ModuleType = llguidance
    return module


def _source(library: ModuleType, schema: str) -> str:
    if len(schema) > MAX_SCHEMA_CHARS:
        raise RequestError(
            f"the JSON schema has {len(schema)} characters, {MAX_SCHEMA_CHARS} are possible", FIELD
        )
    options = {"whitespace_pattern": WHITESPACE, "whitespace_flexible": True, "lenient": False}
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not valid JSON: {error}", FIELD) from error
    if value is False:
        raise RequestError(f"{UNUSABLE}: false allows no value", FIELD)
    if value is True:
        schema = "{}"
    elif not isinstance(value, dict):
        raise RequestError(f"a JSON schema is an object, found {schema[:100]}", FIELD)
    try:
        source: str = library.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{UNUSABLE}: {error}", FIELD) from error
    return source


def _reason(error: str) -> str:
    """What the library says, in words that help whoever wrote the schema."""
    if error.startswith("NoExtensionBias"):
        return "no output can follow it, for instance because it refers to itself without end"
    if error.startswith("oneOf"):
        return "oneOf is not supported, anyOf is"
    return error.removesuffix("<non-verbose/>").rstrip()


def _largest_id(tokenizer: dict[str, Any]) -> int:
    vocab = tokenizer["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    added = (token["id"] for token in tokenizer.get("added_tokens") or ())
    return max((*ids, *added), default=0)
