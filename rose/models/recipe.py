"""How hidden states become a vector: pooling, modules and prompts, as the checkpoint says.

Reads the files of sentence-transformers in the older and the newer style. Free of torch.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal

from rose.models.config import CONFIG_FILE, MODULES_FILE, CheckpointFolder, Setting
from rose.models.errors import CheckpointError
from rose.models.recipe_late import (
    LIBRARY_TYPE,
    MASK,
    PYLATE_DENSE,
    PYLATE_TYPE,
    is_late,
    read_token_modules,
)
from rose.models.recipe_modules import (
    DenseModule,
    NormalizeModule,
    PoolingModule,
    SpladeModule,
    VectorModule,
    read_dense,
    read_layer_norm,
    read_normalize,
    read_pooling,
    read_splade,
)

SENTENCE_CONFIG = "config_sentence_transformers.json"
_READERS: dict[str, Callable[[CheckpointFolder, str], VectorModule]] = {
    "Dense": read_dense,
    "LayerNorm": read_layer_norm,
    "Normalize": read_normalize,
}
_QUANTIZER = "FlexibleQuantizer"
_SPLADE = "SpladePooling"
_BACKBONES = ("Transformer", "MLMTransformer")  # the latter is the older name before SPLADE
_KNOWN = (*_BACKBONES, "Pooling", _SPLADE, *_READERS, "Dropout", "LogitScore", MASK, _QUANTIZER)
# Other modules may lack a folder: Git keeps no empty ones.
_WITH_FILES = (*_BACKBONES, "Pooling", _SPLADE, "Dense", "LayerNorm")
# Of pplx-embed and of PyLate, whose code is not run but known.
_OWN_TYPES = (f"st_quantize.{_QUANTIZER}", PYLATE_DENSE)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What follows the backbone.

    `modules` run in this order after pooling; a trailing normalisation is not among them but in
    `normalize`, and a quantiser in `quantizer`, so that a request can cut the vector before them.
    `truncate_dim` is the width to which the checkpoint itself cuts its vectors. `chunk_separator`
    is the token between the chunks of a document, where the model was trained with one. `splade`
    stands in place of `pooling` in a sparse embedder. With `late` nothing is pooled: each token's
    hidden state passes through the modules.
    """

    pooling: PoolingModule
    modules: tuple[VectorModule, ...] = ()
    normalize: bool = False
    quantizer: Literal["scale", "tanh"] = "scale"
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    matryoshka: tuple[int, ...] = ()
    chunk_separator: int | None = None
    splade: SpladeModule | None = None
    late: bool = False
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()

    def dimensions(self, hidden_size: int) -> int:
        """Return the width of the finished vector."""
        width = hidden_size * len(self.pooling.modes)
        if self.splade is not None:
            assert self.splade.width is not None, "the plan knows the vocabulary"
            width = self.splade.width
        for module in self.modules:
            if isinstance(module, DenseModule):
                width = module.outputs
        return min(width, self.truncate_dim or width)


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """An entry of modules.json: the class's last name, its whole path, and the module's folder."""

    kind: str
    type: str
    path: str


def read_modules(folder: CheckpointFolder) -> list[ModuleEntry] | None:
    """Read modules.json; None where there is none.

    Raises:
        CheckpointError: an entry is malformed, or of a class that ROSE does not know.
    """
    entries = folder.json_list(MODULES_FILE)
    if entries is None:
        return None
    return [_module_entry(folder, index, entry) for index, entry in enumerate(entries)]


def _module_entry(folder: CheckpointFolder, index: int, entry: object) -> ModuleEntry:
    where = f"{folder.path / MODULES_FILE}: entry {index}"
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise CheckpointError(f"{where}: an object with a type is expected, found {entry!r}")
    kind = entry["type"].rpartition(".")[2]
    is_own = entry["type"] in _OWN_TYPES
    is_library = entry["type"].startswith("sentence_transformers.") and kind != _QUANTIZER
    if not (is_own or is_library) or kind not in _KNOWN:
        raise CheckpointError(
            f"{where}: module {entry['type']!r} is not supported. Known: {', '.join(_KNOWN)}."
        )
    path = entry.get("path") or ""
    if not isinstance(path, str) or not _stays_within(path):
        raise CheckpointError(f"{where}: path: a folder within the model is expected: {path!r}")
    if kind in _WITH_FILES and not (folder.path / path).is_dir():
        raise CheckpointError(
            f"{where}: module {entry['type']!r} is to be in {folder.path / path}, "
            "but there is no such folder"
        )
    return ModuleEntry(kind, entry["type"], path)


def _stays_within(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # half a surrogate pair names no file
        return False
    pure = PurePosixPath(path)
    return "\0" not in path and not pure.is_absolute() and ".." not in pure.parts


def transformer_path(folder: CheckpointFolder) -> str:
    """Return the subfolder that holds the backbone, "" for the folder itself."""
    entries = read_modules(folder)
    if entries is None:
        return ""
    if not entries or entries[0].kind not in _BACKBONES:
        found = entries[0].type if entries else "nothing"
        raise CheckpointError(
            f"{folder.path / MODULES_FILE}: the first module must be a Transformer, found {found}"
        )
    return entries[0].path


def read_recipe(folder: CheckpointFolder, *, causal: bool) -> Recipe:
    """Read how a checkpoint's hidden states become vectors.

    Without modules.json: the mean over the tokens, or the last token of a causal model; no
    modules; not normalised; and a warning.

    Raises:
        CheckpointError: a module, mode or setting is malformed or not supported.
    """
    entries = read_modules(folder)
    if is_late(folder, entries):
        recipe = _late(folder, entries)
    elif entries is None:
        recipe = _default_recipe(causal=causal)
    else:
        recipe = _from_entries(folder, entries)
    return _add_sentence_config(folder, recipe)


def _default_recipe(*, causal: bool) -> Recipe:
    mode = "last" if causal else "mean"
    source = f"default of {'causal' if causal else 'bidirectional'} models"
    return Recipe(
        pooling=PoolingModule((mode,)),
        settings=(Setting("pooling", mode, source), Setting("normalize", False, source)),
        warnings=(
            f"the checkpoint has no modules.json: pooling is {mode!r}, the {source}, "
            "and vectors are not normalised unless a request asks for it",
        ),
    )


def _from_entries(folder: CheckpointFolder, entries: list[ModuleEntry]) -> Recipe:
    if any(entry.kind == _SPLADE for entry in entries):
        return _sparse(folder, entries)
    _check_order(folder, entries)
    pooling = read_pooling(folder, entries[1].path)
    pooling_file = f"{entries[1].path}/config.json"
    quantizes = entries[-1].kind == _QUANTIZER
    modules = [
        _READERS[entry.kind](folder, entry.path) for entry in entries[2:] if entry.kind in _READERS
    ]
    normalize = False
    while modules and isinstance(modules[-1], NormalizeModule):
        modules.pop()
        normalize = True
    settings = (
        Setting("pooling", "+".join(pooling.modes), pooling_file),
        Setting("pooling includes prompt", pooling.include_prompt, pooling_file),
        *(Setting(f"module {i}", str(module), MODULES_FILE) for i, module in enumerate(modules, 2)),
        Setting("normalize", normalize, MODULES_FILE),
        *([Setting("quantizer", "tanh", MODULES_FILE)] if quantizes else []),
    )
    missing = f"{pooling_file} is missing or empty: pooling is the mean"
    warnings = () if folder.json(pooling_file) else (missing,)
    return Recipe(
        pooling,
        tuple(modules),
        normalize,
        "tanh" if quantizes else "scale",
        settings=settings,
        warnings=warnings,
    )


def _sparse(folder: CheckpointFolder, entries: list[ModuleEntry]) -> Recipe:
    kinds = [entry.kind for entry in entries]
    if kinds[1:] != [_SPLADE] or kinds[0] not in _BACKBONES:
        raise CheckpointError(
            f"{folder.path / MODULES_FILE}: a Transformer, then {_SPLADE}, are expected, "
            f"found {', '.join(kinds)}"
        )
    splade = read_splade(folder, entries[1].path)
    file = f"{entries[1].path}/config.json"
    settings = (Setting("pooling", str(splade), file), Setting("normalize", False, MODULES_FILE))
    return Recipe(PoolingModule((str(splade),)), splade=splade, settings=settings)


def _late(folder: CheckpointFolder, entries: list[ModuleEntry] | None) -> Recipe:
    transformer_path(folder)  # checks the first entry
    modules = read_token_modules(folder, entries)
    file = CONFIG_FILE if entries is None else MODULES_FILE
    settings = (
        Setting("pooling", "none: a vector for each token", file),
        *(Setting(f"module {i}", str(module), file) for i, module in enumerate(modules, 1)),
    )
    return Recipe(PoolingModule(("none",)), modules, late=True, settings=settings)


def _check_order(folder: CheckpointFolder, entries: list[ModuleEntry]) -> None:
    transformer_path(folder)  # checks the first entry
    kinds = [entry.kind for entry in entries]
    is_expected = kinds.count("Transformer") == kinds.count("Pooling") == 1
    misplaced = "LogitScore" in kinds or _QUANTIZER in kinds[:-1]
    misplaced |= _QUANTIZER in kinds and "Normalize" in kinds
    if not is_expected or kinds[1] != "Pooling" or misplaced:
        raise CheckpointError(
            f"{folder.path / MODULES_FILE}: a Transformer, then one Pooling, then other modules, a "
            f"quantizer last, are expected, found {', '.join(kinds)}"
        )


def read_prompts(folder: CheckpointFolder) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the one that applies by default.

    Raises:
        CheckpointError: a setting is malformed.
    """
    config = folder.json(SENTENCE_CONFIG) or {}
    where = str(folder.path / SENTENCE_CONFIG)
    prompts = _prompts(config, where)
    default = config.get("default_prompt_name")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise CheckpointError(
            f"{where}: default_prompt_name: {default!r} is not among the prompts {sorted(prompts)}"
        )
    return prompts, default


def _add_sentence_config(folder: CheckpointFolder, recipe: Recipe) -> Recipe:
    config = folder.json(SENTENCE_CONFIG) or {}
    where = str(folder.path / SENTENCE_CONFIG)
    model_type = config.get("model_type")
    expected = ["SparseEncoder" if recipe.splade else "SentenceTransformer"]
    if recipe.late:
        expected = [PYLATE_TYPE, LIBRARY_TYPE]
    if model_type not in (None, *expected):
        raise CheckpointError(f"{where}: model_type: {model_type!r} does not embed")
    if config.get("max_active_dims") is not None:
        raise CheckpointError(f"{where}: max_active_dims: it is not supported")
    if recipe.late and config.get("truncate_dim") is not None:
        raise CheckpointError(f"{where}: truncate_dim: not supported for vectors of tokens")
    prompts, default = read_prompts(folder)
    truncate = _width(config.get("truncate_dim"), f"{where}: truncate_dim")
    found = [
        Setting(name, value, SENTENCE_CONFIG)
        for name, value in (
            ("prompts", prompts or None),
            ("default_prompt_name", default),
            ("truncate_dim", truncate),
            ("similarity_fn_name", config.get("similarity_fn_name")),
        )
        if value is not None
    ]
    return replace(
        recipe,
        prompts=prompts,
        default_prompt_name=default,
        truncate_dim=truncate,
        matryoshka=_matryoshka(folder),
        settings=(*recipe.settings, *found),
    )


def _prompts(config: dict[str, Any], where: str) -> dict[str, str]:
    prompts = config.get("prompts") or {}
    texts = prompts.values() if isinstance(prompts, dict) else [prompts]
    if not isinstance(prompts, dict) or not all(isinstance(t, str | None) for t in texts):
        raise CheckpointError(f"{where}: prompts: texts by name are expected, found {prompts!r}")
    return {name: text or "" for name, text in prompts.items()}


def _width(value: object, where: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where}: a positive integer is expected, found {value!r}")
    return value


def _matryoshka(folder: CheckpointFolder) -> tuple[int, ...]:
    """Read the widths that a checkpoint was trained for, where a config lists them."""
    key = "matryoshka_dimensions"
    for name in (SENTENCE_CONFIG, "config.json"):
        values = (folder.json(name) or {}).get(key)
        if isinstance(values, list):
            where = f"{folder.path / name}: {key}"
            return tuple(sorted({width for value in values if (width := _width(value, where))}))
    return ()
