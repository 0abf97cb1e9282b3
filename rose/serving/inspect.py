"""Shows what ROSE reads from a checkpoint and will do with it. Loads no weights."""

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.models.added_tokens import TOKENIZER_CONFIG, special_token_sources
from rose.models.config import CONFIG_FILE, CheckpointFolder, Setting
from rose.models.generation import SAMPLING, generation_settings, read_generation_card
from rose.models.plan import Plan, plan_checkpoint
from rose.models.quantized import (
    MINIMA,
    SCALES,
    check_tasks,
    choose_quantization,
    plain_shape,
)
from rose.models.recipe_modules import DenseModule, LayerNormModule
from rose.models.tokenizer import load_tokenizer, lowercases, read_tokenizer_card
from rose.models.weight_checks import check_headers
from rose.models.weight_files import TensorHeader, WeightFiles, find_weight_files, read_headers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from tokenizers import Tokenizer

LOWER_CASE = "do_lower_case"  # how it is called by the files that have it


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of weights.

    `tensors` and `dtypes` (tensors by dtype, such as {"BF16": 290}) are None for a PyTorch file,
    which cannot be looked into without loading it.
    """

    file: str
    bytes: int
    tensors: int | None
    dtypes: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to know of a checkpoint before it is loaded.

    `dimensions` is the width of a vector, None for a model that does not embed. `parameters` counts
    the elements of all tensors, of rounded weights those of the matrices that they stand for; None
    for PyTorch files.
    """

    path: str
    architecture: str
    tasks: tuple[str, ...]
    max_model_len: int
    dimensions: int | None
    parameters: int | None
    weights: list[WeightFile]
    settings: list[Setting]
    warnings: list[str]


def inspect_checkpoint(
    path: str,
    *,
    max_model_len: int | None = None,
    tasks: tuple[str, ...] = (),
    quantization: str | None = None,
) -> Report:
    """Read everything of a model folder but its weights, of which only the headers are checked.

    Raises:
        CheckpointError: it cannot be served; the message says why.
        ValueError: the quantization does not fit the model.
    """
    plan = plan_checkpoint(path, max_model_len=max_model_len, tasks=tasks or None)
    tokenizer = load_tokenizer(plan.core)
    check_headers(plan)
    _check_weights(plan)
    check_tasks(choose_quantization(plan, quantization), plan.tasks)
    files = [plan.files, *module_weights(plan)]
    headers = [header for group in files for header in read_headers(group)]
    return Report(
        path=str(plan.folder.path),
        architecture=plan.architecture.name,
        tasks=plan.tasks,
        max_model_len=plan.max_model_len,
        dimensions=plan.recipe.dimensions(plan.config.hidden_size) if plan.recipe else None,
        parameters=_parameters(plan, headers) if all(f.safetensors for f in files) else None,
        weights=[_weight_file(plan, f, path, headers) for f in files for path in f.paths],
        settings=[
            *(setting for setting in plan.settings if setting.name != LOWER_CASE),
            _letter_case(plan, tokenizer),
            *_generation_settings(plan),
            *_tokenizer_settings(plan),
        ],
        warnings=plan.warnings,
    )


def _check_weights(plan: Plan) -> None:
    """Compare the tensors of the files with those that the model is made of, by their headers."""
    from rose.models.loader import check_weights  # imports torch: after the quick checks

    check_weights(plan)


def module_weights(plan: Plan) -> list[WeightFiles]:
    """Find the weights of the modules that follow the backbone.

    Raises:
        CheckpointError: a module has none.
    """
    modules = plan.recipe.modules if plan.recipe else ()
    folders = [
        module.path
        for module in modules
        if isinstance(module, DenseModule | LayerNormModule) and module.path
    ]
    return [find_weight_files(CheckpointFolder(plan.folder.path / folder)) for folder in folders]


def _weight_file(
    plan: Plan, files: WeightFiles, path: Path, headers: list[TensorHeader]
) -> WeightFile:
    name = str(path.relative_to(plan.folder.path))
    size = path.stat().st_size
    if not files.safetensors:
        return WeightFile(name, size, None, None)
    own = [header for header in headers if header.file == path]
    return WeightFile(name, size, len(own), dict(Counter(header.dtype for header in own)))


def _parameters(plan: Plan, headers: list[TensorHeader]) -> int:
    """Count the numbers of the model, not the scales and minima of those that are rounded."""
    if plan.quantization is None:
        return sum(header.elements for header in headers)
    own = (header for header in headers if not header.name.endswith((SCALES, MINIMA)))
    return sum(math.prod(plain_shape(h.name, h.shape, h.dtype)) for h in own)


def _letter_case(plan: Plan, tokenizer: "Tokenizer") -> Setting:
    """Say whether texts are put into lower case: by their own setting, or by the tokenizer."""
    before = [setting for setting in plan.settings if setting.name == LOWER_CASE and setting.value]
    by_tokenizer = Setting(LOWER_CASE, lowercases(tokenizer), "the tokenizer's normalizer")
    return next(iter(before), by_tokenizer)


def _generation_settings(plan: Plan) -> list[Setting]:
    if "generate" not in plan.tasks:
        return []
    card = read_generation_card(plan.core)
    own, file = generation_settings(plan.core)
    found: dict[str, object] = {
        "eos_token_id": card.eos_token_ids or None,
        "bos_token_id": card.bos_token_id,
        "min_new_tokens": card.min_tokens or None,
    }
    settings = [
        Setting(key, value, CONFIG_FILE if own.get(key) is None else file)
        for key, value in found.items()
        if value is not None
    ]
    if card.logit_bias:
        settings.append(Setting("logit_bias", card.logit_bias, file))
    values = ((key, getattr(card, key)) for key in SAMPLING)
    return settings + [Setting(k, v, file) for k, v in values if v is not None]


def _tokenizer_settings(plan: Plan) -> list[Setting]:
    card = read_tokenizer_card(plan.core, lowercase=plan.lowercase)
    sources = special_token_sources(plan.core)
    settings = [
        Setting(
            name,
            text,
            next((file for file, values in sources if values.get(name)), TOKENIZER_CONFIG),
        )
        for name, text in card.special_tokens.items()
    ]
    if card.split_special:
        settings.append(Setting("split_special_tokens", card.split_special, TOKENIZER_CONFIG))
    if card.chat_templates:
        names = ", ".join(sorted(card.chat_templates))
        files = ("chat_template.jinja", "additional_chat_templates", TOKENIZER_CONFIG)
        found = (name for name in files if (plan.core.path / name).exists())
        settings.append(Setting("chat templates", names, next(found, "chat_template.json")))
    return settings


def as_json(report: Report) -> str:
    """Write a report for machines: one JSON object with the fields of `Report`."""
    import json

    return json.dumps(asdict(report), indent=2, ensure_ascii=False, default=str)


def print_report(report: Report, console: "Console") -> None:
    """Write a report for people."""
    console.print(f"{report.path}: {_summary(report)}\n", highlight=False, markup=False)
    console.print(_settings_table(report.settings))
    console.print(_weights_table(report))
    console.print(_what_was_checked(report), style="dim", highlight=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)


def _what_was_checked(report: Report) -> str:
    if any(file.dtypes is None for file in report.weights):
        return "Weights in PyTorch files are checked when they are loaded."
    return "Names and shapes of the weights fit the config; their numbers are not read."


def _summary(report: Report) -> str:
    parts = [report.architecture, f"can {' and '.join(report.tasks)}"]
    if report.dimensions is not None:
        parts.append(f"vectors of {report.dimensions:,} numbers")
    return ", ".join([*parts, f"up to {report.max_model_len:,} tokens"])


def _settings_table(settings: list[Setting]) -> "Table":
    table = _table("setting", "value", "source")
    for setting in settings:
        table.add_row(setting.name, _show(setting.value), setting.source)
    return table


def _weights_table(report: Report) -> "Table":
    table = _table("weights", "tensors", "dtype", "size")
    for file in report.weights:
        dtypes = "known when loaded" if file.dtypes is None else ", ".join(sorted(file.dtypes))
        tensors = "" if file.tensors is None else f"{file.tensors:,}"
        table.add_row(file.file, tensors, dtypes, f"{file.bytes / 1e6:,.1f} MB")
    if report.parameters is not None:
        table.caption = f"{report.parameters / 1e6:,.1f} million parameters"
    return table


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _show(value: Any) -> str:  # noqa: ANN401 - whatever a checkpoint says
    from rich.markup import escape

    if isinstance(value, str):
        text = value if value.strip() == value and value else repr(value)
    elif isinstance(value, tuple | list):
        text = ", ".join(map(str, value))
    elif isinstance(value, dict):
        text = "\n".join(f"{key}: {item!r}" for key, item in value.items())
    else:
        text = str(value)
    return escape(text)
