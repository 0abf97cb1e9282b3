"""Loads a checkpoint: weights, heads, recipe, tokenizer and card."""

import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from rose.kernels.registry import UnknownNameError
from rose.models.backbone import state_specs
from rose.models.card import EmbeddingCard, EmbeddingOutput, ModelCard
from rose.models.classifier import Classifier, SequenceClassifier, YesNoClassifier
from rose.models.config import Setting
from rose.models.decoder_config import DecoderConfig
from rose.models.embedding import EmbeddingModel
from rose.models.errors import CheckpointError
from rose.models.generation import read_generation_card
from rose.models.heads import EMBEDDING, CausalLM, head_tensor, share_stored_embedding
from rose.models.layers import Part
from rose.models.modules import Pooler, build_modules
from rose.models.plan import NO_HEAD, Plan, fingerprint, give_up_generation, plan_checkpoint
from rose.models.quantized import check_quantization, choose_quantization
from rose.models.splade import SpladePooler, share_decoder
from rose.models.stored_codes import combine_codes
from rose.models.tensors import CheckpointTensors, HeaderTensors, open_tensors
from rose.models.token_heads import TokenModules, load_token_vectors, load_token_weights
from rose.models.tokenizer import read_tokenizer_card, read_tokenizer_json
from rose.models.weights import NamedTensors, fill, name_tensors, wanted_parts

if TYPE_CHECKING:
    from torch import nn

    from rose.models.backbone import Backbone
    from rose.models.decoder import DecoderModel
    from rose.models.recipe import Recipe

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(slots=True)
class LoadedModel:
    """A checkpoint in memory.

    `embedding` is None where the model is not loaded to embed, `lm` where it is not loaded to
    generate, `classifier` where it is not loaded to score or classify; all share the backbone.
    `dtype` is that of the weights and of the hidden states. `settings` and `warnings` say what was
    read, from where, and what a user should know. `tokenizer_json` can be used as it is.
    `stored_quantization` is what the weights were stored in, None where they were plain.
    """

    backbone: "Backbone"
    embedding: EmbeddingModel | None
    lm: CausalLM | None
    classifier: Classifier | None
    card: ModelCard
    dtype: torch.dtype
    device: torch.device
    settings: list[Setting]
    warnings: list[str]
    tokenizer_json: bytes
    stored_quantization: str | None


def load(
    path: str | Path,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "cpu",
    max_model_len: int | None = None,
    tasks: tuple[str, ...] | None = None,
    name: str | None = None,
    bidirectional: bool | None = None,
) -> LoadedModel:
    """Load a model folder.

    Args:
        path: the folder.
        dtype: "float32", "float16", "bfloat16", or "auto": float32 on a CPU, where half precision
            is slow or emulated; elsewhere the checkpoint's own.
        quantization: what `rose.models.layers.prepare` is to round the weights to, by name; it is
            noted in the card. None is what the checkpoint says.
        device: a torch device.
        max_model_len: overrides the checkpoint's limit, in tokens.
        tasks: what to serve; None is what the checkpoint is for.
        name: the name under which the model is served; None is the folder's.
        bidirectional: overrides whether a decoder sees what comes after a token.

    Raises:
        CheckpointError: the checkpoint cannot be served; the message says why.
        ValueError: the quantization does not fit the model, the dtype or the device.
    """
    plan = plan_checkpoint(
        path, max_model_len=max_model_len, tasks=tasks, bidirectional=bidirectional
    )
    place = torch.device(device)
    module = build_backbone(plan)
    tensors = open_tensors(plan.core)
    if plan.quantization is not None:
        combine_codes(tensors)
    named = _name(plan, module, tensors)
    chosen = _choose_dtype(plan, dtype, place, named)
    rounded = choose_quantization(plan, quantization)
    check_quantization(rounded, plan.tasks, chosen, place)
    models = _fill(plan, module, named, chosen, place)
    for warning in plan.warnings:
        log.warning("%s: %s", plan.folder.path, warning)
    return LoadedModel(
        backbone=models.backbone,
        embedding=models.embedding,
        lm=models.lm,
        classifier=models.classifier,
        card=_card(plan, chosen, rounded, name, models.embedding),
        dtype=chosen,
        device=place,
        settings=plan.settings,
        warnings=plan.warnings,
        tokenizer_json=read_tokenizer_json(plan.core),
        stored_quantization=plan.quantization,
    )


def check_weights(plan: Plan) -> None:
    """Load a model from the headers of its weights alone: would `load` find what it needs?

    Of PyTorch files nothing is known before they are read.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is of no use.
    """
    if not plan.files.safetensors:
        return
    trial = replace(plan, settings=[], warnings=[])
    module = build_backbone(trial)
    tensors = HeaderTensors(plan.files)
    if plan.quantization is not None:
        combine_codes(tensors)
    named = _name(trial, module, tensors)
    _fill(trial, module, named, torch.float32, torch.device("meta"))


class _Models(NamedTuple):
    backbone: "Backbone"
    embedding: EmbeddingModel | None
    lm: CausalLM | None
    classifier: Classifier | None


def _name(plan: Plan, module: "nn.Module", tensors: CheckpointTensors) -> NamedTensors:
    named = name_tensors(tensors, wanted_parts(module), plan.architecture.fused)
    if plan.tie_embeddings:
        share_stored_embedding(named)
    return named


def _fill(
    plan: Plan, module: "nn.Module", named: NamedTensors, dtype: torch.dtype, device: torch.device
) -> _Models:
    """Fill the backbone, and make and fill what goes on top of it."""
    fill(module, named, dtype, device)
    module.to(device=device)  # buffers: parameters are there already
    backbone = cast("Backbone", module)
    lm = _causal_lm(plan, backbone, named, dtype, device)
    classifier = _classifier(plan, backbone, named, device)
    recipe = plan.recipe
    embedding = _embedding(plan, recipe, backbone, named, dtype, device) if recipe else None
    named.check_used((*plan.architecture.ignored, *plan.unused_head))
    return _Models(backbone, embedding, lm, classifier)


def build_backbone(plan: Plan) -> "nn.Module":
    """Make the backbone, without weights.

    Raises:
        CheckpointError: the config names something that there is not.
    """
    module, _, kind = plan.architecture.backbone.partition(":")
    try:
        return cast("nn.Module", getattr(import_module(module), kind)(plan.config).eval())
    except UnknownNameError as error:
        raise CheckpointError(f"{plan.core.path / 'config.json'}: {error}") from error


def _choose_dtype(plan: Plan, dtype: str, device: torch.device, named: NamedTensors) -> torch.dtype:
    if dtype == "auto":
        chosen, source = default_dtype(device, named)
    elif dtype in DTYPES:
        chosen, source = DTYPES[dtype], "option --dtype"
    else:
        raise CheckpointError(f"dtype {dtype!r} is unknown. Known: auto, {', '.join(DTYPES)}.")
    plan.settings.append(Setting("dtype", _text(chosen), source))
    return chosen


def default_dtype(device: torch.device, named: NamedTensors) -> tuple[torch.dtype, str]:
    """Return float32 on a CPU, else what most weights are stored in, and why."""
    if device.type == "cpu":
        return torch.float32, "default on a CPU"
    stored = Counter(named.tensors.get(name).dtype for name in named.names.values())
    most = stored.most_common(1)[0][0]
    return (most, "the weights") if most in DTYPES.values() else (torch.float32, "default")


def _causal_lm(
    plan: Plan,
    backbone: "Backbone",
    named: NamedTensors,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM | None:
    """Make the LM head. Where it is missing but nobody asked for it, go on without."""
    if "generate" not in plan.tasks:
        return None
    source, warning = head_tensor(named, tied=plan.tie_embeddings)
    if source is None:
        give_up_generation(plan, NO_HEAD)
        return None
    if warning:
        plan.warnings.append(warning)
    plan.settings.append(Setting("LM head", source, "the weights"))
    lm = CausalLM(backbone, _logit_cap(plan))
    if source == EMBEDDING:
        lm.lm_head.share(cast("DecoderModel", backbone).embedding.weight)
    else:
        fill(lm.lm_head, named, dtype, device)
    return lm.eval()


def _classifier(
    plan: Plan, backbone: "Backbone", named: NamedTensors, device: torch.device
) -> Classifier | None:
    """Make the head that scores, in float32."""
    scoring = plan.scoring
    if scoring is None:
        return None
    if scoring.head is None:
        return _yes_no(plan, backbone, named, device)
    model = SequenceClassifier(backbone, scoring.head, len(scoring.card.labels))
    fill(model.head, named, torch.float32, device)
    return cast("Classifier", model.eval())


def _yes_no(
    plan: Plan, backbone: "Backbone", named: NamedTensors, device: torch.device
) -> Classifier:
    """Take the rows of the LM head that belong to "yes" and "no"."""
    assert plan.scoring is not None
    source, _ = head_tensor(named, tied=plan.tie_embeddings)
    if source is None:
        raise CheckpointError(NO_HEAD)
    whole = named.get(Part(source, (backbone.vocab_size, backbone.hidden_size)))
    weight = whole[list(plan.scoring.token_ids)].to(device, torch.float32)
    return cast("Classifier", YesNoClassifier(backbone, weight, _logit_cap(plan)).eval())


def _logit_cap(plan: Plan) -> float | None:
    return plan.config.logit_cap if isinstance(plan.config, DecoderConfig) else None


def _embedding(
    plan: Plan,
    recipe: "Recipe",
    backbone: "Backbone",
    named: NamedTensors,
    dtype: torch.dtype,
    device: torch.device,
) -> EmbeddingModel:
    modules = build_modules(plan.folder, recipe, backbone.hidden_size, device, named)
    if recipe.late:
        _check_expansion(plan, backbone)
        width = recipe.dimensions(backbone.hidden_size)
        return EmbeddingModel(backbone, None, (), width, TokenModules(modules, width)).eval()
    pooler = _splade(plan, recipe, backbone, named, dtype, device) or Pooler(recipe.pooling)
    return EmbeddingModel(
        backbone,
        pooler,
        modules,
        recipe.dimensions(backbone.hidden_size),
        load_token_vectors(plan.core, backbone.hidden_size, device),
        load_token_weights(plan.core, backbone.hidden_size, device),
    ).eval()


def _check_expansion(plan: Plan, backbone: "Backbone") -> None:
    """Refuse tokens that others do not see where a state carries on whatever it meets."""
    expansion = plan.late.expansion if plan.late else None
    if expansion is not None and not expansion.attend and state_specs(backbone):
        raise CheckpointError(
            f"{plan.folder.path}: query expansion that is not attended to does not go with "
            f"{plan.architecture.name}, whose layers carry a state"
        )


def _splade(
    plan: Plan,
    recipe: "Recipe",
    backbone: "Backbone",
    named: NamedTensors,
    dtype: torch.dtype,
    device: torch.device,
) -> SpladePooler | None:
    """Make the pooler of a sparse embedder."""
    if recipe.splade is None or plan.masked_head is None:
        return None
    share_decoder(named, plan.masked_head)
    pooler = SpladePooler(
        recipe.splade, plan.masked_head, backbone.hidden_size, backbone.vocab_size
    )
    fill(pooler, named, dtype, device)
    pooler.untie()
    return pooler


def _card(
    plan: Plan,
    dtype: torch.dtype,
    quantization: str | None,
    name: str | None,
    embedding: EmbeddingModel | None,
) -> ModelCard:
    options: dict[str, Any] = {
        "dtype": _text(dtype),
        "max_model_len": plan.max_model_len,
        "tasks": plan.tasks,
    }
    if quantization is not None:
        options["quantization"] = quantization
    return ModelCard(
        name=name or plan.folder.path.resolve().name,
        path=str(plan.folder.path),
        architecture=plan.architecture.name,
        dtype=_text(dtype),
        tasks=plan.tasks,
        vocab_size=plan.config.vocab_size,
        max_model_len=plan.max_model_len,
        fingerprint=fingerprint(plan, options),
        created=int(time.time()),
        tokenizer=read_tokenizer_card(plan.core, lowercase=plan.lowercase),
        embedding=_embedding_card(plan, plan.recipe, embedding) if plan.recipe else None,
        generation=read_generation_card(plan.core) if "generate" in plan.tasks else None,
        scoring=plan.scoring.card if plan.scoring else None,
        quantization=quantization,
    )


def _embedding_card(
    plan: Plan, recipe: "Recipe", embedding: EmbeddingModel | None
) -> EmbeddingCard:
    return EmbeddingCard(
        dimensions=recipe.dimensions(plan.config.hidden_size),
        hidden_size=plan.config.hidden_size,
        normalize=recipe.normalize,
        pooling="+".join(recipe.pooling.modes),
        matryoshka=recipe.matryoshka,
        prompts=recipe.prompts,
        default_prompt_name=recipe.default_prompt_name,
        pools_prompt=recipe.pooling.include_prompt or plan.chat is not None,
        chat=plan.chat,
        quantizer=recipe.quantizer,
        chunk_separator=recipe.chunk_separator,
        outputs=_outputs(recipe, embedding),
        late=plan.late,
    )


def _outputs(recipe: "Recipe", embedding: EmbeddingModel | None) -> tuple[EmbeddingOutput, ...]:
    if recipe.splade is not None:
        return ("sparse",)
    if recipe.late:
        return ("multi_vector",)
    found: list[EmbeddingOutput] = ["dense"]
    if embedding is not None and embedding.token_weights is not None:
        found.append("sparse")
    if embedding is not None and embedding.token_vectors is not None:
        found.append("multi_vector")
    return tuple(found)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
