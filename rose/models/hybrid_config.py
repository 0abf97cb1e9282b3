"""config.json of hybrid decoders: layers of linear attention beside layers of full attention.

Free of torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

from rose.models.architecture import Architecture
from rose.models.config import ConfigReader
from rose.models.decoder_config import (
    DecoderConfig,
    Experts,
    Family,
    decoder_architecture,
    read_decoder_config,
)
from rose.models.errors import CheckpointError
from rose.models.rope import RopeConfig, RopeFacts, read_ropes
from rose.models.windows import FULL, Windows

LINEAR = "linear_attention"
PARTIAL_ROTARY = 0.25  # of the channels of a head rotate, where the config says nothing
_IGNORED = (r"mtp\..+",)  # layers that predict several tokens ahead


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Facts of the layers of linear attention, which are gated delta nets.

    `value_heads` keep a state each; consecutive ones share one of `key_heads`. `conv_width` tokens
    go into a convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(DecoderConfig):
    """A decoder whose `layer_types` are "linear_attention" or "full_attention".

    `shared_expert_size` is the width of the MLP that every token passes through beside its experts.
    """

    delta_net: DeltaNet
    shared_expert_size: int | None = None


ExpertsReader = Callable[[ConfigReader, int], Experts | None]


def read_hybrid_config(
    family: Family, read_experts: ExpertsReader | None, reader: ConfigReader
) -> HybridConfig:
    """Read config.json.

    Args:
        family: the architecture's defaults.
        read_experts: reads the experts of so many layers; None for architectures without.
        reader: config.json.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    decoder = read_decoder_config(family, reader)
    if not decoder.causal:
        stated = reader.values.get("is_causal") is False
        key = "is_causal" if stated else "use_bidirectional_attention"
        raise CheckpointError(
            f"{reader.where(key)}: {reader.architecture} cannot be bidirectional: its layers of "
            "linear attention read a text from left to right"
        )
    experts = None if read_experts is None else read_experts(reader, decoder.num_layers)
    values = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
    shared = None if experts is None else reader.size("shared_expert_intermediate_size", 512)
    values |= {"experts": experts, "norm_offset": 1.0}
    return HybridConfig(**values, delta_net=_delta_net(reader), shared_expert_size=shared)


def _delta_net(reader: ConfigReader) -> DeltaNet:
    net = DeltaNet(
        key_heads=reader.size("linear_num_key_heads", 16),
        value_heads=reader.size("linear_num_value_heads", 32),
        key_dim=reader.size("linear_key_head_dim", 128),
        value_dim=reader.size("linear_value_head_dim", 128),
        conv_width=reader.size("linear_conv_kernel_dim", 4),
    )
    if net.value_heads % net.key_heads:
        raise CheckpointError(
            f"{reader.where('linear_num_value_heads')}: {net.value_heads} is not a multiple of "
            f"linear_num_key_heads {net.key_heads}"
        )
    return net


def _layer_types(reader: ConfigReader, layers: int) -> Windows:
    """Read which layers see everything: `layer_types`, else one in `full_attention_interval`."""
    stated = reader.optional("layer_types", list)
    if stated is None:
        every = reader.size("full_attention_interval", 4)
        stated = [LINEAR if (index + 1) % every else FULL for index in range(layers)]
    if len(stated) < layers or not all(kind in (FULL, LINEAR) for kind in stated):
        raise CheckpointError(
            f"{reader.where('layer_types')}: one of {FULL!r} and {LINEAR!r} for each of {layers} "
            f"layers is expected, found {stated}"
        )
    if FULL not in stated[:layers]:
        raise CheckpointError(
            f"{reader.where('layer_types')}: none of {layers} layers is {FULL!r}, at least one is "
            "expected"
        )
    return Windows(tuple(stated[:layers]), None)


def _ropes(
    reader: ConfigReader, _: tuple[str, ...], head_dim: int, positions: int
) -> dict[str, RopeConfig]:
    """Read the rotary settings of the layers of full attention; the others have no positions."""
    key = "partial_rotary_factor"
    parameters = reader.values.get("rope_scaling") or reader.values.get("rope_parameters") or {}
    if not reader.has(key) and not (isinstance(parameters, dict) and key in parameters):
        reader.override({key: PARTIAL_ROTARY}, f"default of {reader.architecture}")
    facts = RopeFacts(head_dim, positions, partial=True)
    return read_ropes(reader, (FULL,), facts)


def hybrid_family(
    name: str,
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    kv_heads: int,
    num_layers: int,
) -> Family:
    """Make a member of the family of what differs."""
    return Family(
        name,
        vocab_size=vocab_size,
        intermediate_size=intermediate_size,
        max_positions=32768,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=16,
        kv_heads=kv_heads,
        head_dim=256,
        qk_norm=True,
        windows=_layer_types,
        ropes=_ropes,
    )


def hybrid_architecture(
    family: Family, backbone: str, read_experts: ExpertsReader | None = None
) -> Architecture:
    """Make the registry's entry of a hybrid decoder."""
    read_config = partial(read_hybrid_config, family, read_experts)
    decoder = decoder_architecture(family.name, read_config, backbone)
    return replace(decoder, ignored=(*decoder.ignored, *_IGNORED))
