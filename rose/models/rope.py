"""Rotary position settings of config.json, in the older and the newer style. Free of torch.

Older: `rope_theta` and `rope_scaling` beside each other. Newer: all in `rope_parameters`, maybe one
object per layer type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rose.models.config import ConfigReader, Setting
from rose.models.errors import CheckpointError

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
ROPE_KINDS = tuple(_NEEDED)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions rotate queries and keys.

    `dim` channels of a head rotate. `max_positions` is the config's `max_position_embeddings`,
    `original_positions` the length before an extension. `short_factor` and `long_factor` have one
    number per pair of channels. What a kind does not use stays None.
    """

    kind: str
    theta: float
    dim: int
    max_positions: int
    original_positions: int
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @property
    def fixed_positions(self) -> int | None:
        """Length up to which the rotation of a token does not depend on its sequence's length.

        None is any length. Keys that are kept for later tokens are wrong beyond it.
        """
        lengths = {"dynamic": self.max_positions, "longrope": self.original_positions}
        return lengths.get(self.kind)


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """What an architecture says of its rotation.

    `dim` is the head size, `positions` the config's `max_position_embeddings`, `theta` the base
    where the config states none. `partial` allows a share of the channels to rotate. `kinds` maps
    names that the architecture's older configs use to those of today.
    """

    dim: int
    positions: int
    theta: float = 10000.0
    theta_key: str = "rope_theta"
    original_positions: int | None = None
    partial: bool = False
    kinds: Mapping[str, str] = field(default_factory=dict)


class LayerBase(NamedTuple):
    """The base of a layer type: the key of the older style, the default, and whether it scales.

    `scales` says whether the older `rope_scaling` is meant for layers of this type.
    """

    key: str
    theta: float
    scales: bool


def read_ropes(
    reader: ConfigReader, layer_types: Sequence[str], facts: RopeFacts
) -> dict[str, RopeConfig]:
    """Read the rotary settings of each layer type, which are mostly the same.

    Raises:
        CheckpointError: a kind is unknown, or a setting is missing or malformed.
    """
    parameters, key = _parameters(reader)
    kinds = dict.fromkeys(layer_types)
    if not any(isinstance(value, dict) for value in parameters.values()):
        return dict.fromkeys(kinds, _read_rope(reader, parameters, key, facts))
    missing = [kind for kind in kinds if not isinstance(parameters.get(kind), dict)]
    if missing:
        raise CheckpointError(f"{reader.where(key)}: {missing[0]!r} is missing")
    return {kind: _read_rope(reader, parameters[kind], f"{key}.{kind}", facts) for kind in kinds}


def read_layer_ropes(
    reader: ConfigReader,
    layer_types: Sequence[str],
    facts: RopeFacts,
    bases: Mapping[str, LayerBase],
) -> dict[str, RopeConfig]:
    """Read the rotary settings of an architecture whose layer types differ in their base.

    Raises:
        CheckpointError: a kind is unknown, or a setting is missing or malformed.
    """
    newer = reader.optional("rope_parameters", dict, record=False) or {}
    older = reader.optional("rope_scaling", dict, record=False) or {}
    if newer and not newer.keys() & bases.keys():
        kinds = ", ".join(bases)
        where = reader.where("rope_parameters")
        raise CheckpointError(f"{where}: an object for each of {kinds} is expected, found {newer}")
    ropes = {}
    for kind in dict.fromkeys(layer_types):
        base, own = bases[kind], newer.get(kind) or {}
        if not isinstance(own, dict):
            where = reader.where("rope_parameters")
            raise CheckpointError(f"{where}.{kind}: an object is expected, found {own!r}")
        values = own | older if base.scales else own
        layer = replace(facts, theta=base.theta, theta_key=base.key)
        ropes[kind] = _read_rope(reader, values, f"rope_parameters.{kind}", layer)
    return ropes


def _parameters(reader: ConfigReader) -> tuple[Mapping[str, Any], str]:
    """Choose between the styles as transformers does: a filled `rope_scaling` wins."""
    older = reader.optional("rope_scaling", dict, record=False) or {}
    newer = reader.optional("rope_parameters", dict, record=False) or {}
    if older and newer and older != newer:
        reader.warn("both rope_scaling and rope_parameters are given: rope_scaling is used")
    if older:
        return older, "rope_scaling"
    if newer and reader.has("rope_theta") and newer.get("rope_theta") is not None:
        reader.warn("both rope_theta and rope_parameters are given: rope_parameters is used")
    return newer, "rope_parameters"


def _read_rope(
    reader: ConfigReader, values: Mapping[str, Any], key: str, facts: RopeFacts
) -> RopeConfig:
    rope = ConfigReader(values, f"{reader.file}: {key}", "rope", f"{reader.label}: {key}")
    kind = _kind(rope, facts)
    dim = _rotary_dim(reader, rope, facts)
    original = "original_max_position_embeddings"
    config = RopeConfig(
        kind=kind,
        theta=_theta(reader, rope, facts),
        dim=dim,
        max_positions=facts.positions,
        original_positions=reader.optional_size(original)
        or facts.original_positions
        or rope.optional_size(original)
        or facts.positions,
        truncate=rope.get("truncate", True, bool) if kind == "yarn" else True,
        short_factor=_factors(rope, "short_factor", kind, dim),
        long_factor=_factors(rope, "long_factor", kind, dim),
        **{name: rope.optional(name, float) for name in _NUMBERS},
    )
    _check(rope, config)
    _report(reader, rope, key, config, facts)
    return config


def _theta(reader: ConfigReader, rope: ConfigReader, facts: RopeFacts) -> float:
    own = rope.optional("rope_theta", float, record=False)
    outer = reader.optional(facts.theta_key, float, record=False)
    return next((theta for theta in (own, outer) if theta is not None), facts.theta)


def _factors(rope: ConfigReader, key: str, kind: str, dim: int) -> tuple[float, ...] | None:
    """Read one number per pair of rotary channels."""
    values = rope.optional(key, list) if kind == "longrope" else None
    if values is None:
        return None
    numbers = [
        v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0
    ]
    if len(values) != dim // 2 or len(numbers) != len(values):
        raise CheckpointError(
            f"{rope.file}: {key}: {dim // 2} positive numbers are expected, found {values}"
        )
    return tuple(map(float, numbers))


def _report(
    reader: ConfigReader, rope: ConfigReader, key: str, config: RopeConfig, facts: RopeFacts
) -> None:
    """Pass the settings on, each under its own name, and name keys that mean nothing here."""
    default = f"default of {reader.architecture}"
    stated = bool(rope.values.keys() & {"rope_type", "type"})
    reader.record(f"{key}.kind", config.kind, rope.label if stated else default)
    own, outer = rope.has("rope_theta"), reader.has(facts.theta_key)
    source = rope.label if own else reader.source(facts.theta_key) if outer else default
    reader.record(f"{key}.theta", config.theta, source)
    reader.settings += [Setting(f"{key}.{s.name}", s.value, s.source) for s in rope.settings]
    unknown = sorted(rope.values.keys() - _KNOWN)
    for name in unknown:
        if isinstance(rope.values[name], dict):  # settings of some layers, at the wrong place
            raise CheckpointError(f"{rope.file}: {name}: an object of settings is not known here")
    if unknown:
        reader.warn(f"{rope.file}: unknown settings are not used: {', '.join(unknown)}")


_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "truncate",
    "short_factor",
    "long_factor",
    "original_max_position_embeddings",
    "mrope_section",  # for images: a token of text has one position in all sections,
    "mrope_interleaved",  # so for text the rotation is the plain one
    *_NUMBERS,
}


def _kind(rope: ConfigReader, facts: RopeFacts) -> str:
    older = rope.optional("type", str, record=False)
    name = rope.optional("rope_type", str, record=False) or older or "default"
    kind = facts.kinds.get(name, name)
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{rope.file}: rope kind {kind!r} is not supported. Known: {', '.join(ROPE_KINDS)}."
        )
    return kind


def _rotary_dim(reader: ConfigReader, rope: ConfigReader, facts: RopeFacts) -> int:
    """Return how many channels of a head rotate."""
    for source in (rope, reader):
        share = source.optional("partial_rotary_factor", float)
        if share is None:
            continue
        if share == 1.0:
            return facts.dim
        if not facts.partial:
            raise CheckpointError(
                f"{source.file}: partial_rotary_factor: {share} is not supported by this "
                "architecture, only 1.0"
            )
        dim = int(min(facts.dim * share, 2 * facts.dim))
        if dim % 2 or not 0 < dim <= facts.dim:
            raise CheckpointError(
                f"{source.file}: partial_rotary_factor: {share} of a head of {facts.dim} channels "
                f"is {dim}, which is no even number from 2 to {facts.dim}"
            )
        return dim
    return facts.dim


def _check(rope: ConfigReader, config: RopeConfig) -> None:
    for name in _NEEDED[config.kind]:
        if getattr(config, name) is None:
            raise CheckpointError(f"{rope.file}: {name} is missing for rope kind {config.kind!r}")
    positive = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    for name in positive:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise CheckpointError(f"{rope.file}: {name}: must be above 0, found {value}")
    if config.theta <= 0:
        raise CheckpointError(f"{rope.file}: rope_theta: must be above 0, found {config.theta}")
    if config.kind == "dynamic" and config.dim <= 2:
        raise CheckpointError(f"{rope.file}: rope kind 'dynamic' needs a head_dim above 2")
    if config.kind == "llama3" and config.low_freq_factor == config.high_freq_factor:
        raise CheckpointError(f"{rope.file}: low_freq_factor and high_freq_factor are equal")
