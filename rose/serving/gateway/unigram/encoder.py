"""The C++ encoder as an object of Python's."""

import ctypes
import logging
import os
import threading
import weakref
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.kernels.compiling import BuildError, compile_folder
from rose.serving.gateway.unigram.facts import Charsmap, Replace, Stage, UnigramFacts
from rose.serving.gateway.unigram.unicode_tables import cluster_borders, nfkc_tables

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
SWITCH = "ROSE_FAST_UNIGRAM"
# Each thread of a batch gets at least so many bytes of text: starting one takes as long as some
# thousand bytes do.
BYTES_PER_THREAD = 1 << 14

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_BYTES = ctypes.c_char_p

_TEXTS = (_BYTES, _POINTER, _POINTER, _SIZE)  # strings, their ends, what belongs to them, how many

# Name, result and arguments of the functions of unigram.cpp.
_FUNCTIONS: dict[str, tuple[type[Any] | None, tuple[Any, ...]]] = {
    "builder": (_POINTER, ()),
    "builder_free": (None, (_POINTER,)),
    "words": (_INT, (_POINTER, _INT, _INT, _INT, _BYTES, _SIZE)),
    "template": (_INT, (_POINTER, _POINTER, _SIZE, _POINTER, _SIZE)),
    "replace": (_INT, (_POINTER, _BYTES, _SIZE, _BYTES, _SIZE)),
    "nmt": (_INT, (_POINTER,)),
    "nfkc": (_INT, (_POINTER, _POINTER)),
    "charsmap": (_INT, (_POINTER, _BYTES, _SIZE, _POINTER, _SIZE)),
    "encoder": (_POINTER, (_POINTER, *_TEXTS, _INT, _INT, *_TEXTS)),
    "free": (None, (_POINTER,)),
    "num_bytes": (_SIZE, (_POINTER,)),
    "slack": (_SIZE, (_POINTER,)),
    "encode": (_INT, (_POINTER, _POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER)),
}


class NfkcStruct(ctypes.Structure):
    """`NfkcTables` of nfkc.h."""

    _fields_ = (
        ("points", _POINTER),
        ("classes", _POINTER),
        ("lengths", _POINTER),
        ("decomposed", _POINTER),
        ("num_points", _SIZE),
        ("pairs", _POINTER),
        ("num_pairs", _SIZE),
        ("unknown", _POINTER),
        ("num_unknown", _SIZE),
    )


class UnigramEncoder:
    """Encodes texts as the library does, those that it can. Threads share it.

    Attributes:
        num_bytes: Memory that its trie takes.
    """

    def __init__(self, library: ctypes.CDLL, facts: UnigramFacts) -> None:
        """Build the tries and tables.

        Raises:
            MemoryError: there is not enough.
        """
        self._encode = library.rose_unigram_encode
        self._handle = _Builder(library).encoder(facts)
        # A thread may still be encoding when the interpreter ends: nothing is freed then.
        weakref.finalize(self, library.rose_unigram_free, self._handle).atexit = False
        self._slack: int = library.rose_unigram_slack(self._handle)
        self.num_bytes: int = library.rose_unigram_num_bytes(self._handle)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[npt.NDArray[np.int32] | None]:
        """Token ids of each text; None for a text that only the library can encode.

        Releases the interpreter's lock and takes several cores for many texts.

        Raises:
            UnicodeEncodeError: a text holds half of a surrogate pair.
        """
        encoded = [text.encode() for text in texts]
        lengths = array("q", map(len, encoded))
        ends = list(accumulate(length + self._slack for length in lengths))
        counts = array("q", lengths)
        ids = np.empty(ends[-1] if ends else 0, np.int32)
        done = self._encode(
            self._handle,
            (_BYTES * len(encoded))(*encoded),
            lengths.buffer_info()[0],
            len(encoded),
            special,
            _num_threads(len(encoded), len(ids)),
            ids.ctypes.data,
            counts.buffer_info()[0],
        )
        if not done:
            raise MemoryError("not enough memory to tokenise")
        starts = (0, *ends)
        return [
            None if count < 0 else ids[start : start + count].copy()
            for start, count in zip(starts, counts, strict=False)
        ]


class _Builder:
    """Hands facts over to C++."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._handle = _made(library.rose_unigram_builder())
        weakref.finalize(self, library.rose_unigram_builder_free, self._handle)

    def encoder(self, facts: UnigramFacts) -> int:
        for stage in facts.stages:
            self._add(stage)
        mark = facts.mark.encode()
        self._call("words", facts.white_space, facts.prepend, facts.split, mark, len(mark))
        prefix, suffix = np.array(facts.prefix, np.int32), np.array(facts.suffix, np.int32)
        sides = prefix.ctypes.data, len(prefix), suffix.ctypes.data, len(suffix)
        self._call("template", *sides)
        pieces, ends = _joined(facts.pieces)
        literals, literal_ends = _joined(facts.literals)
        scores = np.array(facts.scores, np.float64)
        vocabulary = pieces, ends.ctypes.data, scores.ctypes.data, len(scores)
        options = facts.unk_id, facts.byte_fallback
        literal_ids = np.fromiter(facts.literals.values(), np.int32, len(facts.literals))
        added = literals, literal_ends.ctypes.data, literal_ids.ctypes.data, len(literal_ids)
        return self._call("encoder", *vocabulary, *options, *added)

    def _add(self, stage: Stage) -> None:
        if isinstance(stage, Charsmap):
            borders = cluster_borders()
            blob = stage.blob
            self._call("charsmap", blob, len(blob), borders.ctypes.data, len(borders))
        elif isinstance(stage, Replace):
            pattern = b"" if stage.regex else stage.pattern.encode()
            content = stage.content.encode()
            self._call("replace", pattern, len(pattern), content, len(content))
        elif stage.name == "NFKC":
            self._call("nfkc", ctypes.byref(_nfkc_struct()))
        else:
            self._call("nmt")

    def _call(self, name: str, *arguments: object) -> int:
        return _made(getattr(self._library, f"rose_unigram_{name}")(self._handle, *arguments))


def _nfkc_struct() -> NfkcStruct:
    tables = nfkc_tables()
    characters = (*(array.ctypes.data for array in tables[:4]), len(tables.points))
    pairs = tables.pairs.ctypes.data, len(tables.pairs)
    return NfkcStruct(*characters, *pairs, tables.unknown.ctypes.data, len(tables.unknown))


def _made(result: int | None) -> int:
    if not result:
        raise MemoryError("not enough memory for a tokenizer")
    return result


def _joined(texts: Iterable[str]) -> tuple[bytes, npt.NDArray[np.int64]]:
    """The texts one after another, and where each ends."""
    encoded = [text.encode() for text in texts]
    return b"".join(encoded), np.fromiter(accumulate(map(len, encoded)), np.int64, len(encoded))


def _num_threads(texts: int, num_bytes: int) -> int:
    most = min(texts, num_bytes // BYTES_PER_THREAD)
    return 1 if most <= 1 else min(most, _num_cores())


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_lock = threading.Lock()
_loaded: list[ctypes.CDLL | None] = []  # what was loaded, or empty before


def load_library() -> ctypes.CDLL | None:
    """Return the compiled encoder, built at first use; None where the library serves alone.

    It does where ROSE_FAST_UNIGRAM is "off" and where nothing can be built, which is logged.

    Raises:
        ValueError: the environment variable has an unknown value.
    """
    with _lock:
        if not _loaded:
            _loaded.append(_load() if is_wanted() else None)
    return _loaded[0]


def is_wanted() -> bool:
    """Say whether ROSE_FAST_UNIGRAM is "on", as it is by default.

    Raises:
        ValueError: it has an unknown value.
    """
    switch = os.environ.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise ValueError(f"{SWITCH}={switch!r} is neither on nor off")
    return switch == "on"


def _load() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(compile_folder("unigram", SOURCES, FLAGS)))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = library[f"rose_unigram_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(library, f"rose_unigram_{name}", function)
    except (BuildError, OSError, AttributeError) as error:
        log.info("Unigram tokenizers: the tokenizers library is used, because %s", error)
        return None
    return library
