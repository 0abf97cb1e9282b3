"""Fills a model's parameters from a checkpoint, strictly.

Every parameter is filled exactly once, every tensor is used or on the architecture's list of
tensors to ignore, every shape is checked. A parameter of one tensor in the wanted dtype and device
is the mapped file itself: no second copy in memory.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rose.models.errors import CheckpointError
from rose.models.layers import Part, WeightedModule
from rose.models.tensors import CheckpointTensors

# Components that training frameworks and wrappers put before a backbone's own names.
_WRAPPERS = frozenset(
    {"model", "bert", "roberta", "encoder", "transformer", "backbone"}
    | {"auto_model", "module", "_orig_mod", "0", "base_model"}
)
_OLD_NORM_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(slots=True)
class NamedTensors:
    """A checkpoint's tensors by the names that the model knows them by.

    `names` maps the model's name to the name in the file. What a model uses is noted in `used`.
    """

    tensors: CheckpointTensors
    names: dict[str, str]
    prefix: str
    used: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def get(self, part: Part) -> Tensor:
        """Return a tensor of the shape that the model expects.

        Raises:
            CheckpointError: it is missing, has another shape, or holds no plain numbers.
        """
        stored = self.names.get(part.name)
        if stored is None:
            raise CheckpointError(_missing(part, self))
        self.used.add(part.name)
        tensor = self.tensors.get(stored)
        where = f"tensor {stored!r} of {self.tensors.file(stored)}"
        if tuple(tensor.shape) != part.shape:
            raise CheckpointError(
                f"{where} has shape {list(tensor.shape)}, the config asks for {list(part.shape)}"
            )
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise CheckpointError(f"{where} is of dtype {tensor.dtype}, which is not supported")
        return tensor

    def check_used(self, ignored: Iterable[str]) -> None:
        """Refuse a checkpoint with tensors that nothing used and no pattern of `ignored` matches.

        Raises:
            CheckpointError: there are some.
        """
        pattern = re.compile("|".join(f"(?:{item})" for item in ignored) or r"(?!)")
        extra = [
            f"{stored!r} of {self.tensors.file(stored)}"
            for name, stored in self.names.items()
            if name not in self.used and not pattern.fullmatch(name)
        ]
        if extra:
            more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
            raise CheckpointError(
                "the checkpoint has tensors that this architecture has no use for: "
                f"{', '.join(extra[:5])}{more}"
            )


def _missing(part: Part, named: NamedTensors) -> str:
    files = ", ".join(map(str, named.tensors.paths))
    return f"tensor {named.prefix + part.name!r} is missing from {files}"


def name_tensors(tensors: CheckpointTensors, wanted: Iterable[str]) -> NamedTensors:
    """Match a checkpoint's names with those of a model, whatever prefix they were saved with.

    Tensors outside the prefix (an LM head beside "model.") keep their name, without the wrappers
    that the prefix shares with it.

    Raises:
        CheckpointError: two sets of tensors fit equally well.
    """
    stored = _modern_names(tensors)
    prefix = _find_prefix(stored, set(wanted))
    names: dict[str, str] = {}
    for name, original in stored.items():
        known = _strip(name, prefix)
        if known in names:
            raise CheckpointError(
                f"tensors {names[known]!r} and {original!r} of {tensors.file(original)} "
                f"are both {known!r}"
            )
        names[known] = original
    return NamedTensors(tensors, names, prefix)


def _modern_names(tensors: CheckpointTensors) -> dict[str, str]:
    """Map today's names to those in the file."""
    stored: dict[str, str] = {}
    for name in tensors:
        modern = _modern(name)
        if modern in stored:
            raise CheckpointError(
                f"tensors {name!r} and {stored[modern]!r} of {tensors.file(name)} are the same"
            )
        stored[modern] = name
    return stored


def _modern(name: str) -> str:
    for old, new in _OLD_NORM_NAMES.items():
        if name == old or name.endswith(f".{old}"):
            return name.removesuffix(old) + new
    return name


def _find_prefix(stored: Iterable[str], wanted: set[str]) -> str:
    """Choose the prefix under which most of the wanted names are found."""
    counts: dict[str, int] = {}
    for name in stored:
        for prefix in _prefixes(name):
            if name.removeprefix(prefix) in wanted:
                counts[prefix] = counts.get(prefix, 0) + 1
    if not counts:
        return ""
    most = max(counts.values())
    best = sorted(prefix for prefix, count in counts.items() if count == most)
    if len(best) > 1:
        raise CheckpointError(f"the checkpoint holds the model twice, under prefixes {best}")
    return best[0]


def _prefixes(name: str) -> Iterator[str]:
    """Yield the prefixes of `name` that consist of wrappers only: "", "model.", ..."""
    prefix = ""
    yield prefix
    for component in name.split(".")[:-1]:
        if component not in _WRAPPERS:
            return
        prefix += f"{component}."
        yield prefix


def _strip(name: str, prefix: str) -> str:
    """Take off the prefix, or as many of its leading components as the name has."""
    components = prefix.split(".")[:-1]
    while components and not name.startswith(".".join(components) + "."):
        components.pop()
    return name.removeprefix("".join(f"{component}." for component in components))


def weighted_modules(model: nn.Module) -> Iterator[WeightedModule]:
    """Yield the modules of a model that hold parameters."""
    return (module for module in model.modules() if isinstance(module, WeightedModule))


def wanted_names(model: nn.Module) -> list[str]:
    """List the checkpoint tensors that fill a model."""
    modules = weighted_modules(model)
    return [part.name for module in modules for parts in module.slots.values() for part in parts]


def fill(model: nn.Module, named: NamedTensors, dtype: torch.dtype, device: torch.device) -> None:
    """Fill every parameter of a model.

    Raises:
        CheckpointError: a tensor is missing or unfit.
    """
    for module in weighted_modules(model):
        for attribute, parts in module.slots.items():
            tensor = _assemble(parts, named, dtype, device)
            module.register_parameter(attribute, nn.Parameter(tensor, requires_grad=False))
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"parameters without weights: {left}"


def _assemble(
    parts: tuple[Part, ...], named: NamedTensors, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if len(parts) == 1:
        return named.get(parts[0]).to(device, dtype).contiguous()
    rows = sum(part.shape[0] for part in parts)
    packed = torch.empty(rows, *parts[0].shape[1:], dtype=dtype, device=device)
    start = 0
    for part in parts:
        packed[start : start + part.shape[0]] = named.get(part)
        start += part.shape[0]
    return packed
