"""Writes a folder whose matrices are stored as codes of 8 or 4 bits."""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rose.models.config import CONFIG_FILE
from rose.models.errors import CheckpointError, ConvertError
from rose.models.heads import head_tensor, share_stored_embedding
from rose.models.layers import Projection
from rose.models.loader import build_backbone, load
from rose.models.plan import Plan, plan_checkpoint
from rose.models.quantized import COMPARED, CONFIG_KEY, METHOD, VERSION, check_tasks
from rose.models.quantizing import MAX_LEN, prepare_loaded
from rose.models.sample_texts import encode_samples, input_power
from rose.models.stored_codes import PowerOfRows, store
from rose.models.tensors import open_tensors
from rose.models.tokenizer import read_tokenizer_json
from rose.models.weights import NamedTensors, fill, name_tensors, wanted_parts

if TYPE_CHECKING:
    from rose.models.backbone import Backbone

Progress = Callable[[int, int, str], None]


def convert_quantized(
    source: Path,
    out: Path,
    quantization: str,
    progress: Progress | None = None,
    *,
    tasks: tuple[str, ...] | None = None,
) -> None:
    """Write a model folder once more, with its matrices rounded.

    It loads as the source does with `--quantization`, with the same answers to the bit, and takes
    about a quarter or an eighth of float32 on disk. The folder appears under its name when it is
    complete.

    Args:
        source: a model folder.
        out: the folder to make; it must not exist yet.
        quantization: "int8" or "int4".
        progress: called as (tensors done, tensors in all, name of the tensor) along the way.
        tasks: what it is to be served for; None is what the checkpoint is for.

    Raises:
        ConvertError: `out` exists, or the source is quantised.
        CheckpointError: the source cannot be served, or not for these tasks.
        ValueError: the quantization does not fit the model, or changes its vectors too much, or
            these cannot be computed here.
    """
    if out.exists():
        raise ConvertError(f"{out}: exists already")
    plan = plan_checkpoint(source, tasks=tasks)
    if plan.quantization is not None:
        raise ConvertError(f"{source}: is stored in {plan.quantization} already")
    check_tasks(quantization, plan.tasks)
    if compares := set(plan.tasks) != {"generate"}:
        prepare_loaded(load(source, dtype="float32", quantization=quantization, tasks=tasks))
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        _copy_small_files(plan, unfinished)
        core = unfinished / plan.core.path.relative_to(plan.folder.path)
        _note_in_config(core / CONFIG_FILE, quantization, compared=compares)
        tensors = _round(plan, quantization, progress)
        weights = core / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        shutil.copymode(core / CONFIG_FILE, weights)  # safetensors gives it to this user alone
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _copy_small_files(plan: Plan, target: Path) -> None:
    """Copy a folder without the weights of its backbone."""
    own = {path.name for path in plan.files.paths}
    own |= {"model.safetensors.index.json", "pytorch_model.bin.index.json"}

    def left_out(folder: str, names: list[str]) -> set[str]:
        hidden = {name for name in names if name.startswith(".")}
        return hidden | (own & set(names) if Path(folder) == plan.core.path else set())

    shutil.copytree(plan.folder.path, target, ignore=left_out)


def _note_in_config(path: Path, quantization: str, *, compared: bool) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    noted = {"quant_method": METHOD, "kind": quantization, "version": VERSION}
    config[CONFIG_KEY] = noted | {COMPARED: compared}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _round(plan: Plan, quantization: str, progress: Progress | None) -> dict[str, Tensor]:
    module = build_backbone(plan)
    named = name_tensors(open_tensors(plan.core), wanted_parts(module), plan.architecture.fused)
    if plan.tie_embeddings:
        share_stored_embedding(named)
    power = _power(plan, module, named) if quantization == "int4" else {}
    powers = _powers_of_rows(module.modules(), named, power)
    kinds = dict.fromkeys(powers, quantization)
    if "generate" in plan.tasks:
        kinds[named.names[_head(plan, named)]] = "int8"  # as `CausalLM` wants it
    stored, everything = {}, list(named.tensors)
    for done, name in enumerate(everything):
        if progress is not None:
            progress(done, len(everything), name)
        tensor = named.tensors.get(name)
        parts = {name: tensor}
        if name in kinds:
            parts = store(name, tensor, kinds[name], powers.get(name, ()))
        stored.update({key: value.contiguous().clone() for key, value in parts.items()})
    return stored


def _power(plan: Plan, module: nn.Module, named: NamedTensors) -> "Mapping[nn.Module, Tensor]":
    """Return the powers of inputs that weights of 4 bits are chosen by when a model is loaded."""
    fill(module, named, torch.float32, torch.device("cpu"))
    backbone = cast("Backbone", module)
    limit = min(MAX_LEN, plan.max_model_len)
    texts = encode_samples(read_tokenizer_json(plan.core), backbone.vocab_size, limit)
    return input_power(backbone, texts)


def _powers_of_rows(
    modules: Iterator[nn.Module], named: NamedTensors, power: "Mapping[nn.Module, Tensor]"
) -> dict[str, list[PowerOfRows]]:
    """Return the powers of all stored tensors that fill projections, where they are known."""
    found: dict[str, list[PowerOfRows]] = {}
    for module in modules:
        if isinstance(module, Projection):
            for part in module.slots["weight"]:
                whole, start, stop = part.name, 0, part.shape[0]
                if part.name in named.rows:
                    whole, start, stop, _ = named.rows[part.name]
                rows = PowerOfRows(start, stop, power.get(module))
                found.setdefault(named.names[whole], []).append(rows)
    return found


def _head(plan: Plan, named: NamedTensors) -> str:
    head, _ = head_tensor(named, tied=plan.tie_embeddings)
    if head is None:
        raise CheckpointError(f"{plan.core.path}: there is no LM head")
    return head
