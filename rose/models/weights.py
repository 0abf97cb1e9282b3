"""Fills a model's parameters from a checkpoint, strictly.

Every parameter is filled exactly once, every tensor is used or on the architecture's list of
tensors to ignore, every shape is checked. A parameter of one tensor in the wanted dtype and device
is the mapped file itself: no second copy in memory.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rose.models.architecture import Fused
from rose.models.errors import CheckpointError
from rose.models.layers import Part, WeightedModule
from rose.models.tensors import CheckpointTensors

# Components that training frameworks and wrappers put before a backbone's own names.
_WRAPPERS = frozenset(
    {"model", "encoder", "transformer", "backbone", "language_model"}
    | {"bert", "roberta", "distilbert", "mpnet", "nomic_bert", "gte", "new"}
    | {"auto_model", "module", "_orig_mod", "0", "base_model"}
)
# Tensors [experts, rows, columns] that hold the same projections of all experts.
_STACKED_EXPERTS: Fused = (
    ("experts.gate_up_proj", ("gate_proj", "up_proj")),
    ("experts.down_proj", ("down_proj",)),
)
_OLD_NORM_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class Rows(NamedTuple):
    """Rows of the tensor that the model knows as `whole`, from `start` to `stop`.

    `leading` are the dimensions of the whole without the last one of a weight: (rows,), or
    (experts, rows of each), which are counted through.
    """

    whole: str
    start: int
    stop: int
    leading: tuple[int, ...]


@dataclass(slots=True)
class NamedTensors:
    """A checkpoint's tensors by the names that the model knows them by.

    `names` maps the model's name to the name in the file, `rows` the names of projections that are
    stored as rows of another tensor to where they are. What a model uses is noted in `used`.
    """

    tensors: CheckpointTensors
    names: dict[str, str]
    prefix: str
    rows: dict[str, Rows] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.names or name in self.rows

    def get(self, part: Part) -> Tensor:
        """Return a tensor of the shape that the model expects.

        Raises:
            CheckpointError: it is missing, has another shape, or holds no plain numbers.
        """
        stored = self.names.get(part.name)
        if stored is None and part.name in self.rows:
            whole, start, stop, leading = self.rows[part.name]
            tensor = self.get(Part(whole, (*leading, *part.shape[1:])))
            return tensor.reshape(-1, *part.shape[1:])[start:stop]
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


def name_tensors(
    tensors: CheckpointTensors, wanted: Iterable[Part], fused: Fused = ()
) -> NamedTensors:
    """Match a checkpoint's names with those of a model, whatever prefix they were saved with.

    Tensors outside the prefix (an LM head beside "model.") keep their name, without the wrappers
    that the prefix shares with it. Projections may be stored as one tensor by the rules of `fused`.

    Raises:
        CheckpointError: two sets of tensors fit equally well.
    """
    stored = _modern_names(tensors)
    sizes = {part.name: part.shape[0] for part in wanted}
    prefix = _find_prefix(stored, set(sizes))
    names: dict[str, str] = {}
    for name, original in stored.items():
        known = _strip(name, prefix)
        if known in names:
            raise CheckpointError(
                f"tensors {names[known]!r} and {original!r} of {tensors.file(original)} "
                f"are both {known!r}"
            )
        names[known] = original
    rows = {part: row for name in names for part, row in _find_rows(name, sizes, fused)}
    rows |= {part: row for name in names for part, row in _find_experts(name, sizes)}
    return NamedTensors(tensors, names, prefix, rows)


def _find_rows(name: str, sizes: Mapping[str, int], fused: Fused) -> Iterator[tuple[str, Rows]]:
    """Yield the projections that the tensor `name` holds, and which of its rows they are."""
    projection, _, kind = name.rpartition(".")
    for holder, held in fused:
        if f".{projection}".endswith(f".{holder}"):
            owner = projection.removesuffix(holder)
            parts = [f"{owner}{part}.{kind}" for part in held]
            if all(part in sizes for part in parts):
                ends = list(accumulate((sizes[part] for part in parts), initial=0))
                for part, start, stop in zip(parts, ends, ends[1:], strict=False):
                    yield part, Rows(name, start, stop, (ends[-1],))


def _find_experts(name: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, Rows]]:
    """Yield the experts' projections that the tensor `name` holds, and which of its rows."""
    for holder, held in _STACKED_EXPERTS:
        if f".{name}".endswith(f".{holder}"):
            owner = name.removesuffix(holder)
            parts: list[str] = []
            for number in count():
                expert = [f"{owner}experts.{number}.{part}.weight" for part in held]
                if expert[0] not in sizes:
                    break
                parts += expert
            ends = list(accumulate((sizes[part] for part in parts), initial=0))
            leading = (number, ends[-1] // max(1, number))
            for part, start, stop in zip(parts, ends, ends[1:], strict=False):
                yield part, Rows(name, start, stop, leading)


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


def wanted_parts(model: nn.Module) -> list[Part]:
    """List the checkpoint tensors that fill a model."""
    modules = weighted_modules(model)
    return [part for module in modules for parts in module.slots.values() for part in parts]


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
    assert device.type == "meta" or not left, f"parameters without weights: {left}"


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
