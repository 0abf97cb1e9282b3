"""Loads a checkpoint: weights, heads, recipe, tokenizer and card."""

import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from rose.kernels.registry import UnknownNameError
from rose.models.card import EmbeddingCard, ModelCard
from rose.models.config import Setting
from rose.models.embedding import EmbeddingModel
from rose.models.errors import CheckpointError
from rose.models.modules import Pooler, build_modules
from rose.models.plan import Plan, fingerprint, plan_checkpoint
from rose.models.tensors import open_tensors
from rose.models.tokenizer import read_tokenizer_card, read_tokenizer_json
from rose.models.weights import fill, name_tensors, wanted_names

if TYPE_CHECKING:
    from torch import nn

    from rose.models.backbone import Backbone
    from rose.models.recipe import Recipe

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(slots=True)
class LoadedModel:
    """A checkpoint in memory.

    `embedding` is None where the model is not loaded to embed. `dtype` is that of the weights and
    of the hidden states. `settings` and `warnings` say what was read, from where, and what a user
    should know. `tokenizer_json` can be used as it is.
    """

    backbone: "Backbone"
    embedding: EmbeddingModel | None
    card: ModelCard
    dtype: torch.dtype
    device: torch.device
    settings: list[Setting]
    warnings: list[str]
    tokenizer_json: bytes


def load(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    tasks: tuple[str, ...] | None = None,
    name: str | None = None,
) -> LoadedModel:
    """Load a model folder.

    Args:
        path: the folder.
        dtype: "float32", "float16", "bfloat16", or "auto": float32 on a CPU, where half precision
            is slow or emulated; elsewhere the checkpoint's own.
        device: a torch device.
        max_model_len: overrides the checkpoint's limit, in tokens.
        tasks: what to serve; None is what the checkpoint is for.
        name: the name under which the model is served; None is the folder's.

    Raises:
        CheckpointError: the checkpoint cannot be served; the message says why.
    """
    plan = plan_checkpoint(path, max_model_len=max_model_len, tasks=tasks)
    place = torch.device(device)
    tensors = open_tensors(plan.core)
    backbone = _build_backbone(plan)
    named = name_tensors(tensors, wanted_names(backbone))
    chosen = _choose_dtype(plan, dtype, place)
    fill(backbone, named, chosen, place)
    named.check_used(plan.architecture.ignored)
    model = cast("Backbone", backbone)
    return LoadedModel(
        backbone=model,
        embedding=_embedding(plan, plan.recipe, model, place) if plan.recipe else None,
        card=_card(plan, chosen, name),
        dtype=chosen,
        device=place,
        settings=plan.settings,
        warnings=plan.warnings,
        tokenizer_json=read_tokenizer_json(plan.core),
    )


def _build_backbone(plan: Plan) -> "nn.Module":
    module, _, kind = plan.architecture.backbone.partition(":")
    try:
        return cast("nn.Module", getattr(import_module(module), kind)(plan.config).eval())
    except UnknownNameError as error:  # an activation, as yet
        raise CheckpointError(f"{plan.core.path / 'config.json'}: {error}") from error


def _choose_dtype(plan: Plan, dtype: str, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        if dtype not in DTYPES:
            raise CheckpointError(f"dtype {dtype!r} is unknown. Known: auto, {', '.join(DTYPES)}.")
        plan.settings.append(Setting("dtype", dtype, "option --dtype"))
        return DTYPES[dtype]
    plan.settings.append(Setting("dtype", "float32", f"default of the device {device.type}"))
    return torch.float32


def _embedding(
    plan: Plan, recipe: "Recipe", backbone: "Backbone", device: torch.device
) -> EmbeddingModel:
    modules = build_modules(plan.folder, recipe, backbone.hidden_size, device)
    return EmbeddingModel(
        backbone, Pooler(recipe.pooling), modules, recipe.dimensions(backbone.hidden_size)
    ).eval()


def _card(plan: Plan, dtype: torch.dtype, name: str | None) -> ModelCard:
    text = str(dtype).removeprefix("torch.")
    options = {"dtype": text, "max_model_len": plan.max_model_len, "tasks": plan.tasks}
    return ModelCard(
        name=name or plan.folder.path.resolve().name,
        path=str(plan.folder.path),
        architecture=plan.architecture.name,
        dtype=text,
        tasks=plan.tasks,
        vocab_size=plan.config.vocab_size,
        max_model_len=plan.max_model_len,
        fingerprint=fingerprint(plan, options),
        created=int(time.time()),
        tokenizer=read_tokenizer_card(plan.core, lowercase=plan.lowercase),
        embedding=_embedding_card(plan, plan.recipe) if plan.recipe else None,
    )


def _embedding_card(plan: Plan, recipe: "Recipe") -> EmbeddingCard:
    return EmbeddingCard(
        dimensions=recipe.dimensions(plan.config.hidden_size),
        normalize=recipe.normalize,
        pooling="+".join(recipe.pooling.modes),
        matryoshka=recipe.matryoshka,
        prompts=recipe.prompts,
        default_prompt_name=recipe.default_prompt_name,
        pools_prompt=recipe.pooling.include_prompt,
    )
