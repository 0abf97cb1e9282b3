"""Rotary position settings of config.json, in the older and the newer style. Free of torch.

Older: `rope_theta` and `rope_scaling` beside each other. Newer: all in `rope_parameters`, maybe one
object per layer type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    theta = reader.get("rope_theta", default_theta, float)
    kinds = dict.fromkeys(layer_types)
    if not any(isinstance(value, dict) for value in parameters.values()):
        rope = _read_rope(reader, parameters, key, theta, dim, positions)
        return dict.fromkeys(kinds, rope)
    missing = [kind for kind in kinds if not isinstance(parameters.get(kind), dict)]
    if missing:
        raise CheckpointError(f"{reader.source(key)}: {key}: {missing[0]!r} is missing")
    return {
        kind: _read_rope(reader, parameters[kind], f"{key}.{kind}", theta, dim, positions)
        for kind in kinds
    }


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
    reader: ConfigReader,
    values: Mapping[str, Any],
    key: str,
    theta: float,
    dim: int,
    positions: int,
) -> RopeConfig:
    rope = ConfigReader(values, f"{reader.source(key.partition('.')[0])}: {key}", "rope")
    kind = _kind(rope)
    _check_partial(reader, rope)
    original = reader.optional_size("original_max_position_embeddings")
    config = RopeConfig(
        kind=kind,
        theta=rope.get("rope_theta", theta, float),
        dim=dim,
        max_positions=positions,
        original_positions=original
        or rope.optional_size("original_max_position_embeddings")
        or positions,
        truncate=rope.get("truncate", True, bool),
        **{name: rope.optional(name, float) for name in _NUMBERS},
    )
    _check(rope, config)
    stated = {s.name: s.value for s in rope.settings if not s.source.startswith("default")}
    reader.settings.append(Setting(f"{key}.kind", kind, rope.file if values else "default of rope"))
    reader.settings += [Setting(f"{key}.{n}", v, rope.file) for n, v in stated.items()]
    return config


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
