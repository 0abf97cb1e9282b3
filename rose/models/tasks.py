"""What a checkpoint can be served for, and what it is for. Free of torch."""

from typing import TYPE_CHECKING, get_args

from rose.models.card import Task
from rose.models.classifier_config import read_labels
from rose.models.config import CONFIG_FILE, MODULES_FILE, CheckpointFolder, ConfigReader
from rose.models.errors import CheckpointError
from rose.models.recipe import read_modules
from rose.models.recipe_late import is_late

if TYPE_CHECKING:
    from rose.models.architecture import Architecture, ModelConfig

TASKS: tuple[str, ...] = get_args(Task)


def possible_tasks(architecture: "Architecture") -> list[Task]:
    """List what checkpoints of an architecture can be for."""
    has = {
        "embed": True,
        "generate": architecture.lm_head,
        "score": architecture.lm_head or architecture.classifier is not None,
        "classify": architecture.classifier is not None,
    }
    return [task for task in get_args(Task) if has[task]]


def is_classifier(reader: ConfigReader) -> bool:
    """Say whether the checkpoint was saved as a sequence classifier."""
    return _is_saved_as(reader, "ForSequenceClassification")


def _is_saved_as(reader: ConfigReader, ending: str) -> bool:
    names = reader.values.get("architectures") or []
    return isinstance(names, list) and any(str(name).endswith(ending) for name in names)


def choose_tasks(
    folder: CheckpointFolder,
    reader: ConfigReader,
    architecture: "Architecture",
    config: "ModelConfig",
    wanted: tuple[str, ...] | None,
) -> tuple[tuple[Task, ...], str]:
    """Return the tasks to serve, in the order of `Task`, and what says so.

    Args:
        folder: the model's folder.
        reader: config.json.
        architecture: the registry's entry.
        config: the architecture's config.
        wanted: `--task`; None is what the checkpoint is for.

    Raises:
        CheckpointError: a task is unknown, or not one of this checkpoint.
    """
    modules = read_modules(folder)
    late = is_late(folder, modules)
    possible = ("embed", "score") if late else _possible(reader, architecture, config)
    if wanted:
        return _check(wanted, possible, architecture), "option --task"
    source = f"{CONFIG_FILE}: architectures" if modules is None else MODULES_FILE
    if late:
        return possible, source
    embeds = any(module.kind == "Pooling" for module in modules or ())
    if is_classifier(reader) and architecture.classifier is not None:
        return (possible[:1] if embeds else possible[1:]), source
    if modules and modules[-1].kind == "LogitScore":
        return _check(("score",), possible, architecture), source
    is_lm = "generate" in possible and any(
        _is_saved_as(reader, ending) for ending in ("ForCausalLM", "ForConditionalGeneration")
    )
    if modules is not None:
        return (("embed", "generate") if is_lm else ("embed",)), source
    return (("generate",) if is_lm else ("embed",)), source


def _possible(
    reader: ConfigReader, architecture: "Architecture", config: "ModelConfig"
) -> tuple[Task, ...]:
    """Every checkpoint embeds; a classifier is for pairs if it has one label."""
    if is_classifier(reader) and architecture.classifier is not None:
        return ("embed", "score" if len(read_labels(reader)) == 1 else "classify")
    if architecture.lm_head and config.causal:
        return ("embed", "generate", "score")
    return ("embed",)


def _check(
    wanted: tuple[str, ...], possible: tuple[Task, ...], architecture: "Architecture"
) -> tuple[Task, ...]:
    for task in wanted:
        if task not in TASKS:
            raise CheckpointError(f"task {task!r} is unknown. Known: {', '.join(TASKS)}.")
        if task not in possible:
            raise CheckpointError(
                f"this {architecture.name} checkpoint cannot {task}, only {', '.join(possible)}"
            )
    return tuple(task for task in possible if task in wanted)
