"""What the headers of weight files tell of a config, before anything is built. Free of torch.

Whether every tensor is there and fits is checked when the weights are loaded.
"""

import re
from typing import TYPE_CHECKING

from rose.models.config import CONFIG_FILE
from rose.models.errors import CheckpointError
from rose.models.quantized import plain_shape
from rose.models.weight_files import TensorHeader, WeightFiles, read_headers, tensor_names

if TYPE_CHECKING:
    from rose.models.config import ConfigReader
    from rose.models.plan import Plan

_LAYERS = ("num_hidden_layers", "n_layers", "n_layer")
_EXPERTS = ("num_experts", "num_local_experts")
_SIZES = (
    *("vocab_size", "type_vocab_size", "num_labels", "head_dim"),
    *("hidden_size", "dim", "n_embd", "intermediate_size", "moe_intermediate_size", "hidden_dim"),
    *("n_inner", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads"),
)
# More than any model has; for files that say nothing of their tensors before they are loaded.
_MOST_LAYERS = 1000
_MOST_EXPERTS = 4096  # more than any model has, too: of each there are some tensors a layer
_LAYER_INDEX = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
_DTYPES = ("F64", "F32", "F16", "BF16")


def check_counts(reader: "ConfigReader", files: WeightFiles) -> None:
    """Refuse numbers of a config that the weights cannot have: they would be allocated.

    Raises:
        CheckpointError: there are more layers than tensors, or a size is beyond any tensor.
    """
    names, headers = tensor_names(files), read_headers(files)
    if names is None:
        _check_most(reader, files, _LAYERS, _MOST_LAYERS, "layers that ROSE expects at most")
    else:
        _check_most(reader, files, _LAYERS, len(names), "tensors")
    _check_most(reader, files, _EXPERTS, _MOST_EXPERTS, "experts that ROSE expects at most")
    if headers:
        elements = max(header.elements for header in headers)
        _check_most(reader, files, _SIZES, elements, "elements of the largest tensor")
    else:
        _check_most(reader, files, _SIZES, _bytes(files), "bytes")


def _check_most(
    reader: "ConfigReader", files: WeightFiles, keys: tuple[str, ...], most: int, what: str
) -> None:
    for key in keys:
        value = reader.values.get(key)
        if isinstance(value, int) and value > most:
            raise CheckpointError(
                f"{reader.where(key)}: {value} is more than the {most} {what} of {_list(files)}"
            )


def _bytes(files: WeightFiles) -> int:
    return sum(path.stat().st_size for path in files.paths)


def _list(files: WeightFiles) -> str:
    more = f" and {len(files.paths) - 1} more files" if len(files.paths) > 1 else ""
    return f"{files.paths[0]}{more}"


def check_headers(plan: "Plan") -> None:
    """Refuse what headers show to be unfit: layers, embeddings and types of numbers.

    Raises:
        CheckpointError: the weights cannot be loaded.
    """
    headers = read_headers(plan.files)
    if not headers:
        return
    _check_layers(plan, headers)
    shapes = {plain_shape(header.name, header.shape, header.dtype) for header in headers}
    config = plan.config
    wanted = {"token embedding (vocab_size, hidden_size)": (config.vocab_size, config.hidden_size)}
    if config.learned_positions:
        positions = (config.stated_positions, config.hidden_size)
        wanted["position table (max_position_embeddings, hidden_size)"] = positions
    for what, shape in wanted.items():
        if shape not in shapes:
            raise CheckpointError(
                f"{_list(plan.files)}: no tensor has the shape {list(shape)} of the {what} of "
                f"{plan.core.path / CONFIG_FILE}"
            )
    for header in headers:
        if header.name.endswith(".weight") and header.dtype not in _DTYPES:
            raise CheckpointError(
                f"tensor {header.name!r} of {header.file} is of dtype {header.dtype}, "
                "which is not supported"
            )


def _check_layers(plan: "Plan", headers: list[TensorHeader]) -> None:
    ignored = re.compile("|".join(rf"(?:.+\.)?{item}" for item in plan.architecture.ignored))
    names = [header.name for header in headers if not ignored.fullmatch(header.name)]
    found = [int(match[1]) for name in names if (match := _LAYER_INDEX.search(name))]
    layers = max(found, default=-1) + 1
    if layers != plan.config.num_layers:
        raise CheckpointError(
            f"{plan.core.path / CONFIG_FILE}: the config asks for {plan.config.num_layers} layers, "
            f"{_list(plan.files)} holds tensors of {layers}"
        )
