"""Late interaction (ColBERT) as checkpoints state it: what follows the backbone, and settings.

Three forms: PyLate's, that of sentence-transformers' MultiVectorEncoder, and stanford-nlp's. Free
of torch.
"""

import string
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rose.models.config import CONFIG_FILE, MODULES_FILE, CheckpointFolder, ConfigReader, Setting
from rose.models.errors import CheckpointError
from rose.models.recipe_modules import (
    DenseModule,
    NormalizeModule,
    VectorModule,
    read_dense,
    read_normalize,
)
from rose.models.transformer_module import transformer_settings
from rose.models.weight_files import find_weight_files, read_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rose.models.recipe import ModuleEntry

TOKENS = "token_embeddings"  # what modules take and give, where the others have one vector
MASK = "MultiVectorMask"
PYLATE_DENSE = "pylate.models.Dense.Dense"
PYLATE_TYPE, LIBRARY_TYPE = "ColBERT", "MultiVectorEncoder"  # values of model_type
STANFORD_METADATA = "artifact.metadata"
STANFORD_WEIGHT = "linear.weight"  # beside the backbone's tensors
_STANFORD_CLASS = "HF_ColBERT"
_SENTENCE_CONFIG = "config_sentence_transformers.json"
_PYLATE, _STANFORD = "PyLate", "stanford-nlp ColBERT"
_QUERY_LENGTH, _PYLATE_DOCUMENT, _STANFORD_DOCUMENT = 32, 180, 220  # the libraries' defaults
_SIDES = ("query", "document")


@dataclass(frozen=True, slots=True)
class Marker:
    """The text of a token that marks queries or documents, and where it is stated."""

    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Expansion:
    """Queries are filled up to `length` tokens; with `fixed` none is longer.

    `token` is the text of the token to fill with; None is the mask token, else the end token.
    """

    length: int
    fixed: bool
    attend: bool
    token: str | None
    where: str


@dataclass(frozen=True, slots=True)
class LateSettings:
    """What a checkpoint says of queries and documents; None is what it does not say.

    `skip_words` are entries of the vocabulary whose vectors are left out.
    """

    query_length: int | None
    document_length: int | None
    lengths_file: str
    query_marker: Marker | None = None
    document_marker: Marker | None = None
    expansion: Expansion | None = None
    skip_words: tuple[str, ...] = ()
    skip_sides: tuple[str, ...] = ("document",)
    mean: bool = False
    settings: list[Setting] = field(default_factory=list)

    @property
    def longest(self) -> Setting | None:
        """The longest text that the checkpoint speaks of; None where it does not."""
        if self.document_length is None:
            return None
        query = self.expansion.length if self.expansion else self.query_length
        return Setting("max_model_len", max(self.document_length, query or 1), self.lengths_file)


def is_late(folder: CheckpointFolder, entries: "Sequence[ModuleEntry] | None") -> bool:
    """Say whether a checkpoint is for late interaction."""
    if entries is None:
        return is_stanford(folder)
    config = folder.json(_SENTENCE_CONFIG) or {}
    if config.get("model_type") in (PYLATE_TYPE, LIBRARY_TYPE) or "query_prefix" in config:
        return True
    return any(entry.kind == MASK or entry.type == PYLATE_DENSE for entry in entries)


def is_stanford(folder: CheckpointFolder) -> bool:
    """Say whether a folder was saved by stanford-nlp's ColBERT."""
    names = (folder.json(CONFIG_FILE) or {}).get("architectures")
    return isinstance(names, list) and _STANFORD_CLASS in names


def read_token_modules(
    folder: CheckpointFolder, entries: "Sequence[ModuleEntry] | None"
) -> tuple[VectorModule, ...]:
    """Read what each token's hidden state passes through.

    Raises:
        CheckpointError: a module is malformed, not supported, or out of place.
    """
    if entries is None:
        return (_stanford_projection(folder), NormalizeModule())
    modules: list[VectorModule] = []
    for entry in entries[1:]:
        if entry.kind == "Dense":
            modules.append(read_dense(folder, entry.path, TOKENS))
        elif entry.kind == "Normalize":
            modules.append(read_normalize(folder, entry.path, TOKENS))
        elif entry.kind != MASK:
            raise CheckpointError(
                f"{folder.path / MODULES_FILE}: module {entry.type!r} does not go with vectors of "
                f"tokens: Dense, Normalize and {MASK} do"
            )
    if _is_pylate(folder, entries) and not any(isinstance(m, NormalizeModule) for m in modules):
        modules.append(NormalizeModule())  # what PyLate does without a module
    if not any(isinstance(module, DenseModule) for module in modules):
        found = ", ".join(entry.kind for entry in entries)
        raise CheckpointError(
            f"{folder.path / MODULES_FILE}: a Dense module is expected, found {found}"
        )
    return tuple(modules)


def _stanford_projection(folder: CheckpointFolder) -> DenseModule:
    """The projection among the backbone's tensors; an empty path says so."""
    hidden = ConfigReader(folder.json(CONFIG_FILE) or {}, str(folder.path / CONFIG_FILE), _STANFORD)
    inputs = hidden.optional_size("hidden_size")
    files = find_weight_files(folder)
    shapes = [h.shape for h in read_headers(files) if h.name == STANFORD_WEIGHT]
    if shapes and len(shapes[0]) == 2:
        outputs: int | None = shapes[0][0]
    else:
        outputs = _metadata(folder).optional_size("dim")
    if inputs is None or outputs is None or (files.safetensors and not shapes):
        raise CheckpointError(
            f"{files.paths[0]}: tensor {STANFORD_WEIGHT!r} [dim, hidden_size] is expected in a "
            f"checkpoint of {_STANFORD_CLASS}"
        )
    return DenseModule("", inputs, outputs, bias=False, activation="identity", residual=False)


def read_late_settings(
    folder: CheckpointFolder, core: CheckpointFolder, entries: "Sequence[ModuleEntry] | None"
) -> LateSettings:
    """Read how queries and documents are encoded.

    Raises:
        CheckpointError: a setting is malformed or not supported.
    """
    if entries is None:
        return _stanford_settings(folder)
    if _is_pylate(folder, entries):
        return _pylate_settings(folder)
    return _library_settings(folder, core, entries)


def _is_pylate(folder: CheckpointFolder, entries: "Sequence[ModuleEntry]") -> bool:
    """PyLate names its class or, before it did, its module and what texts begin with."""
    config = folder.json(_SENTENCE_CONFIG) or {}
    model_type = config.get("model_type")
    has_signs = "query_prefix" in config or any(entry.type == PYLATE_DENSE for entry in entries)
    return model_type == PYLATE_TYPE or (model_type != LIBRARY_TYPE and has_signs)


def _pylate_settings(folder: CheckpointFolder) -> LateSettings:
    file = str(folder.path / _SENTENCE_CONFIG)
    reader = ConfigReader(folder.json(_SENTENCE_CONFIG) or {}, file, _PYLATE, _SENTENCE_CONFIG)
    length = reader.size("query_length", _QUERY_LENGTH)
    expansion = None
    if reader.get("do_query_expansion", True, bool):
        attend = reader.get("attend_to_expansion_tokens", False, bool)
        expansion = Expansion(length, True, attend, None, reader.where("do_query_expansion"))
    return LateSettings(
        query_length=length,
        document_length=reader.size("document_length", _PYLATE_DOCUMENT),
        lengths_file=f"{_SENTENCE_CONFIG}: document_length",
        query_marker=_marker(reader, "query_prefix", "[Q] "),
        document_marker=_marker(reader, "document_prefix", "[D] "),
        expansion=expansion,
        skip_words=_words(reader, "skiplist_words", tuple(string.punctuation)),
        settings=reader.settings,
    )


def _stanford_settings(folder: CheckpointFolder) -> LateSettings:
    reader = _metadata(folder)
    length = reader.size("query_maxlen", _QUERY_LENGTH)
    for key, expected in (("similarity", "cosine"), ("interaction", "colbert")):
        if reader.get(key, expected, str) != expected:
            raise CheckpointError(
                f"{reader.where(key)}: {reader.values[key]!r} is not supported, only {expected!r}"
            )
    attend = reader.get("attend_to_mask_tokens", False, bool)
    punctuation = reader.get("mask_punctuation", True, bool)
    return LateSettings(
        query_length=length,
        document_length=reader.size("doc_maxlen", _STANFORD_DOCUMENT),
        lengths_file=f"{STANFORD_METADATA}: doc_maxlen",
        query_marker=_marker(reader, "query_token_id", "[unused0]"),
        document_marker=_marker(reader, "doc_token_id", "[unused1]"),
        expansion=Expansion(length, True, attend, None, reader.where("query_maxlen")),
        skip_words=tuple(string.punctuation) if punctuation else (),
        settings=reader.settings,
    )


def _metadata(folder: CheckpointFolder) -> ConfigReader:
    values = folder.json(STANFORD_METADATA) or {}
    file = str(folder.path / STANFORD_METADATA)
    return ConfigReader(values, file, _STANFORD, STANFORD_METADATA)


def _library_settings(
    folder: CheckpointFolder, core: CheckpointFolder, entries: "Sequence[ModuleEntry]"
) -> LateSettings:
    values, name = transformer_settings(core)
    reader = ConfigReader(values, str(core.path / name), LIBRARY_TYPE, name)
    words, sides, settings = _mask(folder, entries)
    return LateSettings(
        query_length=reader.optional_size("query_length"),
        document_length=reader.optional_size("document_length"),
        lengths_file=f"{name}: document_length",
        expansion=_expansion(reader) if any(e.kind == MASK for e in entries) else None,
        skip_words=words,
        skip_sides=sides,
        mean=_similarity(folder) == "meanmaxsim",
        settings=[*reader.settings, *settings],
    )


def _expansion(reader: ConfigReader) -> Expansion | None:
    values = reader.optional("query_expansion", dict)
    if values is None:
        return None
    where = reader.where("query_expansion")
    inner = ConfigReader(values, where, LIBRARY_TYPE)
    known = {"strategy", "attend", "token", "length"}
    strategy, length = values.get("strategy"), inner.optional_size("length")
    if strategy not in ("fixed", "min") or length is None or values.keys() - known:
        raise CheckpointError(
            f"{where}: strategy ('fixed' or 'min'), length, attend and token are expected, "
            f"found {values!r}"
        )
    attend = inner.get("attend", False, bool)
    return Expansion(length, strategy == "fixed", attend, inner.optional("token", str), where)


def _mask(
    folder: CheckpointFolder, entries: "Sequence[ModuleEntry]"
) -> tuple[tuple[str, ...], tuple[str, ...], list[Setting]]:
    """Which words are left out, of texts of which sides, and the settings that say so."""
    entry = next((entry for entry in entries if entry.kind == MASK), None)
    if entry is None:
        return (), (), []
    name = f"{entry.path}/config.json"
    reader = ConfigReader(folder.json(name) or {}, str(folder.path / name), MASK, name)
    extra = reader.values.keys() - {"skiplist_words", "skiplist_tasks", "keep_only_token_ids"}
    if reader.values.get("keep_only_token_ids"):
        extra = {"keep_only_token_ids"}
    if extra:
        raise CheckpointError(f"{reader.where(min(extra))}: it is not supported")
    sides = _words(reader, "skiplist_tasks", ("document",))
    if unknown := set(sides) - set(_SIDES):
        raise CheckpointError(f"{reader.where('skiplist_tasks')}: {min(unknown)!r} is unknown")
    return _words(reader, "skiplist_words", ()), sides, reader.settings


def _similarity(folder: CheckpointFolder) -> str:
    name = (folder.json(_SENTENCE_CONFIG) or {}).get("similarity_fn_name") or "maxsim"
    if name not in ("maxsim", "meanmaxsim"):
        where = folder.path / _SENTENCE_CONFIG
        raise CheckpointError(
            f"{where}: similarity_fn_name: {name!r} is not supported: maxsim and meanmaxsim are"
        )
    return str(name)


def _marker(reader: ConfigReader, key: str, default: str) -> Marker | None:
    text = reader.get(key, default, str)
    return Marker(text, reader.where(key)) if text else None


def _words(reader: ConfigReader, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    values: Any = reader.values.get(key)
    source = reader.source(key)
    if values is None:
        values, source = list(default), f"default of {reader.architecture}"
    if not isinstance(values, list) or not all(isinstance(word, str) for word in values):
        raise CheckpointError(f"{reader.where(key)}: a list of texts is expected, found {values!r}")
    reader.record(key, " ".join(values), source)
    return tuple(values)
