"""Rotary position settings of config.json, in the older and the newer style. Free of torch.

Older: `rope_theta` and `rope_scaling` beside each other. Newer: all in `rope_parameters`, maybe one
object per layer type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rose.models.config import ConfigReader, Setting
from rose.models.errors import CheckpointError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions rotate queries and keys.

    `dim` channels of a head rotate. `max_positions` is the config's `max_position_embeddings`,
    `original_positions` the length before an extension. What a kind does not use stays None.
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


def read_ropes(
    reader: ConfigReader,
    layer_types: Sequence[str],
    dim: int,
    default_theta: float,
    positions: int,
) -> dict[str, RopeConfig]:
    """Read the rotary settings of each layer type.

    Args:
        reader: config.json.
        layer_types: the types that the layers have.
        dim: channels of a head that rotate.
        default_theta: the architecture's base where the config states none.
        positions: the config's `max_position_embeddings`.

    Raises:
        CheckpointError: a kind is unknown, or a setting is missing or malformed.
    """
    parameters, key = _parameters(reader)
    theta = reader.optional("rope_theta", float, record=False)
    fallback = _Fallback(default_theta if theta is None else theta, dim, positions)
    kinds = dict.fromkeys(layer_types)
    if not any(isinstance(value, dict) for value in parameters.values()):
        return dict.fromkeys(kinds, _read_rope(reader, parameters, key, fallback))
    missing = [kind for kind in kinds if not isinstance(parameters.get(kind), dict)]
    if missing:
        raise CheckpointError(f"{reader.where(key)}: {missing[0]!r} is missing")
    return {kind: _read_rope(reader, parameters[kind], f"{key}.{kind}", fallback) for kind in kinds}


class _Fallback(NamedTuple):
    """What the config says outside its rope settings."""

    theta: float
    dim: int
    positions: int


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
    reader: ConfigReader, values: Mapping[str, Any], key: str, fallback: _Fallback
) -> RopeConfig:
    rope = ConfigReader(values, f"{reader.file}: {key}", "rope", f"{reader.label}: {key}")
    kind = _kind(rope)
    _check_partial(reader, rope)
    theta = rope.optional("rope_theta", float, record=False)
    original = "original_max_position_embeddings"
    config = RopeConfig(
        kind=kind,
        theta=fallback.theta if theta is None else theta,
        dim=fallback.dim,
        max_positions=fallback.positions,
        original_positions=reader.optional_size(original)
        or rope.optional_size(original)
        or fallback.positions,
        truncate=rope.get("truncate", True, bool) if kind == "yarn" else True,
        **{name: rope.optional(name, float) for name in _NUMBERS},
    )
    _check(rope, config)
    _report(reader, rope, key, config)
    return config


def _report(reader: ConfigReader, rope: ConfigReader, key: str, config: RopeConfig) -> None:
    """Pass the settings on, each under its own name, and name keys that mean nothing here."""
    default = f"default of {reader.architecture}"
    stated = bool(rope.values.keys() & {"rope_type", "type"})
    reader.record(f"{key}.kind", config.kind, rope.label if stated else default)
    own, outer = rope.has("rope_theta"), reader.has("rope_theta")
    source = rope.label if own else reader.source("rope_theta") if outer else default
    reader.record(f"{key}.theta", config.theta, source)
    reader.settings += [Setting(f"{key}.{s.name}", s.value, s.source) for s in rope.settings]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate", *_NUMBERS}
    unknown = sorted(rope.values.keys() - known - {"original_max_position_embeddings"})
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


def _kind(rope: ConfigReader) -> str:
    older = rope.optional("type", str, record=False)
    kind = rope.optional("rope_type", str, record=False) or older or "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{rope.file}: rope kind {kind!r} is not supported. Known: {', '.join(ROPE_KINDS)}."
        )
    return kind


def _check_partial(reader: ConfigReader, rope: ConfigReader) -> None:
    for source in (rope, reader):
        share = source.optional("partial_rotary_factor", float)
        if share not in (None, 1.0):
            raise CheckpointError(
                f"{source.file}: partial_rotary_factor: {share} is not supported by this "
                "architecture, only 1.0"
            )


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
