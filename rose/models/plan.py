"""What ROSE will do with a checkpoint, worked out from its small files. Free of torch.

Both the loader and `rose inspect` start from this.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rose.models.architecture import Architecture, ModelConfig
from rose.models.card import ChatTexts, LateInteraction, Task
from rose.models.config import CONFIG_FILE, CheckpointFolder, ConfigReader, Setting
from rose.models.contextual import add_separator
from rose.models.errors import CheckpointError
from rose.models.generation import generation_warnings
from rose.models.late_interaction import late_settings, resolve
from rose.models.limits import max_length
from rose.models.masked_lm_config import MaskedHead
from rose.models.quantized import CODES, read_quantization
from rose.models.recipe import Recipe, read_modules, read_recipe, transformer_path
from rose.models.recipe_late import LateSettings, is_late, read_late_settings
from rose.models.recipe_modules import TOKEN_VECTORS_FILE, TOKEN_WEIGHTS_FILE, SpladeModule
from rose.models.registry import ARCHITECTURES, UNSUPPORTED, VARIANTS
from rose.models.scoring import Scoring, read_classifier, read_yes_no
from rose.models.tasks import choose_tasks, is_classifier
from rose.models.transformer_module import (
    EMBED,
    SPARSE,
    TOKENS,
    read_transformer_module,
    transformer_settings,
)
from rose.models.weight_checks import check_counts
from rose.models.weight_files import WeightFiles, find_weight_files, tensor_names

NO_HEAD = (
    "tensor 'lm_head.weight' is missing and tie_word_embeddings is not true, so there is no LM "
    "head (the task embed needs none)"
)
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16  # of a weight file, for the fingerprint
_HASHED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".metadata")


@dataclass(slots=True)
class Plan:
    """The facts of a checkpoint and the settings that they lead to.

    `folder` is the model's folder, `core` the one of its backbone (the same, but in the oldest
    checkpoints of sentence-transformers). `recipe` and `chat` are for models that embed, `scoring`
    for those that score. `unused_head` are patterns of a classification head's tensors where the
    model does not score. `masked_head` is for sparse embedders, `late` for those that compare
    vectors of tokens. `quantization` is what the weights are stored in, None where they are plain.
    """

    folder: CheckpointFolder
    core: CheckpointFolder
    architecture: Architecture
    config: ModelConfig
    tasks: tuple[Task, ...]
    explicit_tasks: bool
    max_model_len: int
    recipe: Recipe | None
    tie_embeddings: bool
    lowercase: bool
    files: WeightFiles
    chat: ChatTexts | None = None
    scoring: Scoring | None = None
    settings: list[Setting] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unused_head: tuple[str, ...] = ()
    masked_head: MaskedHead | None = None
    late: LateInteraction | None = None
    quantization: str | None = None


def plan_checkpoint(
    path: str | Path,
    *,
    max_model_len: int | None = None,
    tasks: "tuple[str, ...] | None" = None,
    bidirectional: bool | None = None,
) -> Plan:
    """Read everything of a checkpoint but its weights.

    Args:
        path: the model's folder.
        max_model_len: overrides the checkpoint's limit, in tokens.
        tasks: what to serve; None is what the checkpoint is for.
        bidirectional: overrides whether a decoder sees what comes after a token.

    Raises:
        CheckpointError: the checkpoint cannot be served, or not for these tasks.
    """
    folder = CheckpointFolder(path)
    subfolder = transformer_path(folder)
    core = CheckpointFolder(folder.path / subfolder) if subfolder else folder
    reader = _config_reader(core, bidirectional)
    architecture, architecture_source = _architecture(reader, core)
    files = find_weight_files(core)
    check_counts(reader, files)
    config = architecture.read_config(reader)
    chosen, tasks_source = choose_tasks(folder, reader, architecture, config, tasks)
    late = _late_settings(folder, core)
    limit, warnings = max_length(
        core, config, max_model_len, chosen, late.longest if late else None
    )
    plan = Plan(
        folder=folder,
        core=core,
        architecture=architecture,
        config=config,
        tasks=chosen,
        explicit_tasks=bool(tasks),
        max_model_len=limit.value,
        recipe=None,
        tie_embeddings=_ties_embeddings(reader, architecture),
        lowercase=False,
        files=files,
        quantization=read_quantization(reader.values, reader.file),
        settings=[
            Setting("architecture", architecture.name, architecture_source),
            Setting("tasks", chosen, tasks_source),
            limit,
            *reader.settings,
        ],
        warnings=[*reader.warnings, *warnings],
    )
    if "embed" in chosen or late is not None:
        _add_recipe(plan, reader)
    if late is not None:
        _add_late(plan, late, limit, option=max_model_len is not None)
    if {"score", "classify"} & set(chosen) and late is None:
        _add_scoring(plan, reader)
    elif architecture.classifier is not None:
        plan.unused_head = architecture.classifier(reader).tensors
    if "generate" in chosen and _lacks_head(plan):
        give_up_generation(plan, NO_HEAD)
    if "generate" in plan.tasks:
        plan.warnings += generation_warnings(plan.core)
    return plan


def _add_recipe(plan: Plan, config: ConfigReader) -> None:
    """Add what sentence-transformers' files say."""
    settings, file = transformer_settings(plan.core)
    recipe = read_recipe(plan.folder, causal=plan.config.causal)
    if recipe.splade is not None:
        recipe = _add_masked_head(plan, config, recipe, recipe.splade)
    recipe = plan.recipe = add_separator(plan.core, recipe)
    use = TOKENS if recipe.late else SPARSE if recipe.splade else EMBED
    module = read_transformer_module(plan.core, use)
    reader = ConfigReader(settings, str(plan.core.path / file), "sentence-transformers", file)
    plan.lowercase = reader.get("do_lower_case", False, bool)
    plan.chat = module.chat
    if module.chat:
        plan.settings.append(Setting("texts", "through the chat template", file))
    for name, head in (("vectors", TOKEN_VECTORS_FILE), ("weights", TOKEN_WEIGHTS_FILE)):
        if plan.core.exists(head):
            plan.settings.append(Setting(f"{name} of tokens", True, head))
    plan.settings += [*reader.settings, *recipe.settings]
    plan.warnings += [*module.warnings, *recipe.warnings]


def _late_settings(folder: CheckpointFolder, core: CheckpointFolder) -> LateSettings | None:
    entries = read_modules(folder)
    return read_late_settings(folder, core, entries) if is_late(folder, entries) else None


def _add_late(plan: Plan, stated: LateSettings, limit: Setting, *, option: bool) -> None:
    """Add what becomes of queries and documents."""
    if plan.chat is not None:
        raise CheckpointError(
            f"{plan.core.path}: vectors of tokens of conversations are not supported"
        )
    plan.late, warnings = resolve(stated, plan.core, plan.config.vocab_size, limit, option=option)
    plan.settings += [*stated.settings, *late_settings(plan.late, stated)]
    plan.warnings += warnings


def _add_masked_head(
    plan: Plan, config: ConfigReader, recipe: Recipe, splade: SpladeModule
) -> Recipe:
    """Add what a sparse embedder needs: the head, and the vocabulary's size for its width."""
    if plan.architecture.masked_lm is None:
        raise CheckpointError(
            f"{plan.folder.path}: sparse embedders of {plan.architecture.name} are not supported"
        )
    plan.masked_head = plan.architecture.masked_lm(config)
    vocab = plan.config.vocab_size
    if splade.width not in (None, vocab):
        raise CheckpointError(
            f"{plan.folder.path}: SpladePooling is for {splade.width} tokens, "
            f"the vocabulary has {vocab}"
        )
    return replace(recipe, splade=replace(splade, width=vocab))


def _add_scoring(plan: Plan, reader: ConfigReader) -> None:
    """Add what is known of scores."""
    if is_classifier(reader):
        scoring = read_classifier(plan.core, reader, plan.architecture, plan.config)
    else:
        scoring = read_yes_no(plan.core, reader, plan.config.vocab_size)
    plan.scoring = scoring
    plan.settings += scoring.settings
    plan.warnings += scoring.warnings


def _ties_embeddings(reader: ConfigReader, architecture: Architecture) -> bool:
    if not architecture.lm_head:
        return False
    return reader.get("tie_word_embeddings", architecture.tie_default, bool)


def _lacks_head(plan: Plan) -> bool:
    """Say whether there surely is no LM head, as far as can be told without loading."""
    if plan.tie_embeddings or (names := tensor_names(plan.files)) is None:
        return False
    heads = (".lm_head.weight", f".lm_head.weight{CODES}")
    return not any(f".{name}".endswith(heads) for name in names)


def give_up_generation(plan: Plan, reason: str) -> None:
    """Serve a model without an LM head to embed only, unless it was to generate.

    Raises:
        CheckpointError: it was, by option or because it is nothing but a language model.
    """
    if plan.explicit_tasks or plan.tasks == ("generate",):
        raise CheckpointError(reason)
    plan.tasks = ("embed",)
    plan.settings = [
        Setting(s.name, plan.tasks, s.source) if s.name == "tasks" else s for s in plan.settings
    ]
    plan.warnings.append(f"text is not generated: {reason}")


def _config_reader(core: CheckpointFolder, bidirectional: bool | None) -> ConfigReader:
    values = core.json(CONFIG_FILE)
    if values is None:
        raise CheckpointError(f"{core.path / CONFIG_FILE} is missing")
    reader = ConfigReader(values, str(core.path / CONFIG_FILE), "this architecture", CONFIG_FILE)
    settings, file = transformer_settings(core)
    for key in ("config_args", "config_kwargs"):  # the older and the newer name
        overrides = settings.get(key)
        if isinstance(overrides, dict):
            reader.override(overrides, f"{file}: {key}")
    if bidirectional is not None:
        values = {"is_causal": not bidirectional, "use_bidirectional_attention": bidirectional}
        reader.override(values, "option bidirectional")
    return reader


def _architecture(reader: ConfigReader, core: CheckpointFolder) -> tuple[Architecture, str]:
    """Return the registry's entry, and what says that it is the one."""
    model_type = reader.optional("model_type", str, record=False)
    if model_type is None:
        raise CheckpointError(f"{reader.file}: model_type is missing")
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        why = f": {UNSUPPORTED[model_type]}" if model_type in UNSUPPORTED else ""
        raise CheckpointError(
            f"{reader.file}: model_type: {model_type!r} is not supported{why}. Known: {known}."
        )
    read_quantization(reader.values, reader.file)
    name = VARIANTS.load(model_type)(reader, core) if model_type in VARIANTS else model_type
    reader.architecture = name
    architecture = ARCHITECTURES.load(name)
    if architecture.text_key is not None:
        _enter_text_config(reader, architecture.text_key)
    what = "model_type" if name == model_type else "model_type, architectures and the weights"
    return architecture, f"{CONFIG_FILE}: {what}"


def _enter_text_config(reader: ConfigReader, key: str) -> None:
    """Take the language model's settings for those of the model; the model's own win."""
    text = reader.optional(key, dict, record=False)
    if text is None:
        raise CheckpointError(f"{reader.file}: {key} is missing")
    own = {name for name, value in reader.values.items() if value is not None}
    inner = {name: value for name, value in text.items() if name not in own}
    reader.override(inner, f"{reader.label}: {key}")


def fingerprint(plan: Plan, options: dict[str, Any]) -> str:
    """Hash what decides on answers, without reading all of the weights.

    It covers the small files, the weight files' names and sizes, blocks spread evenly over each of
    them (fine-tunes of one model differ nowhere but in their numbers), and the options.
    """
    digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode())
    for file in sorted(plan.folder.path.rglob("*")):
        if file.is_file() and file.suffix in _HASHED_SUFFIXES:
            digest.update(str(file.relative_to(plan.folder.path)).encode())
            digest.update(file.read_bytes())
    for file in plan.files.paths:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for index in range(_BLOCKS):  # the first holds the header, the last the file's end
                opened.seek(max(0, size - _BLOCK_BYTES) * index // (_BLOCKS - 1))
                digest.update(opened.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]
