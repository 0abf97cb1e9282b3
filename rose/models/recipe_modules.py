"""The modules of a recipe, each with the reader of its folder's config. Free of torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rose.models.config import CheckpointFolder, ConfigReader
from rose.models.errors import CheckpointError

# sentence-transformers' names of the modes, in the order in which it joins them -> ROSE's names.
POOLING_MODES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
_OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
SENTENCE = "sentence_embedding"  # what most modules take and give: a vector for each text
# Heads that BGE-M3 puts on each token's hidden state, and their files.
TOKEN_VECTORS_FILE = "colbert_linear.pt"
TOKEN_WEIGHTS_FILE = "sparse_linear.pt"
_SPLADE_WIDTHS = ("embedding_dimension", "word_embedding_dimension")  # newer and older name
# Classes of torch.nn that a checkpoint may name -> ROSE's activations. They have no settings there.
TORCH_ACTIVATIONS = {
    "CELU": "celu",
    "ELU": "elu",
    "GELU": "gelu",
    "Hardshrink": "hardshrink",
    "Hardsigmoid": "hardsigmoid",
    "Hardswish": "hardswish",
    "Hardtanh": "hardtanh",
    "Identity": "identity",
    "LeakyReLU": "leaky_relu",
    "LogSigmoid": "logsigmoid",
    "Mish": "mish",
    "RReLU": "rrelu",
    "ReLU": "relu",
    "ReLU6": "relu6",
    "SELU": "selu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
    "Softplus": "softplus",
    "Softshrink": "softshrink",
    "Softsign": "softsign",
    "Tanh": "tanh",
    "Tanhshrink": "tanhshrink",
}


@dataclass(frozen=True, slots=True)
class PoolingModule:
    """One vector per sequence; several modes are joined in this order."""

    modes: tuple[str, ...]
    include_prompt: bool = True


@dataclass(frozen=True, slots=True)
class DenseModule:
    """activation(W x + b), with weights in the module's folder."""

    path: str
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool

    def __str__(self) -> str:
        return f"Dense({self.inputs} -> {self.outputs}, {self.activation})"


@dataclass(frozen=True, slots=True)
class LayerNormModule:
    """Layer norm of the vector, with weights in the module's folder."""

    path: str
    channels: int

    def __str__(self) -> str:
        return f"LayerNorm({self.channels})"


@dataclass(frozen=True, slots=True)
class NormalizeModule:
    """L2 normalisation before further modules."""

    def __str__(self) -> str:
        return "Normalize"


@dataclass(frozen=True, slots=True)
class SpladeModule:
    """A masked language model's logits, pooled to one weight per token of the vocabulary.

    `strategy` is "max" or "sum"; `twice` takes the logarithm twice. `width` is the vocabulary's
    size where the checkpoint states it.
    """

    strategy: str
    twice: bool
    width: int | None

    def __str__(self) -> str:
        return f"splade-{self.strategy}" + ("-log1p" if self.twice else "")


VectorModule = DenseModule | LayerNormModule | NormalizeModule


def read_pooling(folder: CheckpointFolder, path: str) -> PoolingModule:
    """Read a Pooling module in the older style (flags) or the newer (names); the mean if neither.

    Raises:
        CheckpointError: a mode is unknown.
    """
    name = f"{path}/config.json"
    config = folder.json(name) or {}
    where = folder.path / name
    unknown = [key for key in config if key.startswith("pooling_mode_") and key not in _OLD_FLAGS]
    if unknown:
        raise CheckpointError(
            f"{where}: {unknown[0]}: unknown pooling mode. Known: {', '.join(_OLD_FLAGS)}."
        )
    modes = _named_modes(config) or [mode for key, mode in _OLD_FLAGS.items() if config.get(key)]
    for mode in modes:
        if not isinstance(mode, str) or mode not in POOLING_MODES:
            raise CheckpointError(
                f"{where}: unknown pooling mode {mode!r}. Known: {', '.join(POOLING_MODES)}."
            )
    reader = ConfigReader(config, str(where), "Pooling")
    return PoolingModule(
        tuple(POOLING_MODES[mode] for mode in modes) or ("mean",),
        reader.get("include_prompt", True, bool),
    )


def read_splade(folder: CheckpointFolder, path: str) -> SpladeModule:
    """Read a SpladePooling module's config.

    Raises:
        CheckpointError: a setting is malformed or unknown.
    """
    name = f"{path}/config.json"
    config = folder.json(name) or {}
    reader = ConfigReader(config, str(folder.path / name), "SpladePooling")
    known = {"pooling_strategy", "activation_function", *_SPLADE_WIDTHS, "chunk_size"}
    if extra := config.keys() - known:
        raise CheckpointError(f"{reader.file}: {min(extra)}: SpladePooling has no such setting")
    strategy = reader.get("pooling_strategy", "max", str)
    activation = reader.get("activation_function", "relu", str)
    for key, value, values in (
        ("pooling_strategy", strategy, ("max", "sum")),
        ("activation_function", activation, ("relu", "log1p_relu")),
    ):
        if value not in values:
            raise CheckpointError(
                f"{reader.file}: {key}: {value!r} is not supported. Known: {', '.join(values)}."
            )
    widths = [width for key in _SPLADE_WIDTHS if (width := reader.optional_size(key))]
    return SpladeModule(strategy, activation == "log1p_relu", widths[0] if widths else None)


def _named_modes(config: Mapping[str, Any]) -> list[Any]:
    named = config.get("pooling_mode")
    if named is None:
        return []
    return named if isinstance(named, list) else [named]


def _module_reader(
    folder: CheckpointFolder, path: str, kind: str, known: set[str], stage: str
) -> ConfigReader:
    name = f"{path}/config.json"
    config = folder.json(name) or {}
    reader = ConfigReader(config, str(folder.path / name), kind)
    for key in ("module_input_name", "module_output_name"):
        found = reader.get(key, stage, str)
        if found != stage:
            raise CheckpointError(
                f"{reader.file}: {key}: {found!r} is not supported here, only {stage!r}"
            )
    extra = config.keys() - known - {"module_input_name", "module_output_name"}
    if extra:
        raise CheckpointError(f"{reader.file}: {min(extra)}: {kind} has no such setting")
    return reader


def read_dense(folder: CheckpointFolder, path: str, stage: str = SENTENCE) -> DenseModule:
    """Read a Dense module's config; `stage` is what it has to work on.

    Raises:
        CheckpointError: a setting is missing, malformed or unknown.
    """
    known = {"in_features", "out_features", "bias", "activation_function", "use_residual"}
    reader = _module_reader(folder, path, "Dense", known, stage)
    return DenseModule(
        path,
        _required_size(reader, "in_features"),
        _required_size(reader, "out_features"),
        reader.get("bias", True, bool),
        torch_activation(
            reader.get("activation_function", "torch.nn.modules.activation.Tanh", str),
            reader.where("activation_function"),
        ),
        reader.get("use_residual", False, bool),
    )


def torch_activation(name: object, where: str) -> str:
    """Return ROSE's name of an activation that is given as the path of a class of torch.nn.

    Raises:
        CheckpointError: it is another class.
    """
    module, _, kind = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not module.startswith("torch.nn") or kind not in TORCH_ACTIVATIONS:
        known = json.dumps(list(TORCH_ACTIVATIONS))
        raise CheckpointError(f"{where}: {name!r} is not supported. Known of torch.nn: {known}.")
    return TORCH_ACTIVATIONS[kind]


def _required_size(reader: ConfigReader, key: str) -> int:
    value = reader.optional_size(key)
    if value is None:
        raise CheckpointError(f"{reader.file}: {key} is missing")
    return value


def read_layer_norm(folder: CheckpointFolder, path: str) -> LayerNormModule:
    """Read a LayerNorm module's config.

    Raises:
        CheckpointError: a setting is missing, malformed or unknown.
    """
    reader = _module_reader(folder, path, "LayerNorm", {"dimension"}, SENTENCE)
    return LayerNormModule(path, _required_size(reader, "dimension"))


def read_normalize(folder: CheckpointFolder, path: str, stage: str = SENTENCE) -> NormalizeModule:
    """Read a Normalize module's config, where it has one; `stage` is what it has to work on.

    Raises:
        CheckpointError: it normalises something else than the vector.
    """
    _module_reader(folder, path, "Normalize", set(), stage)
    return NormalizeModule()
