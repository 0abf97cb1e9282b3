"""Mixtures of experts in config.json. Free of torch."""

from rose.models.config import ConfigReader
from rose.models.decoder_config import Experts
from rose.models.errors import CheckpointError


def read_experts(
    reader: ConfigReader,
    layers: frozenset[int],
    *,
    count: int,
    per_token: int,
    intermediate_size: int,
    renormalize: bool,
) -> Experts:
    """Read the facts of the experts of some layers; the numbers are the architecture's defaults.

    Raises:
        CheckpointError: a setting is malformed, or a token has more experts than there are.
    """
    key = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
    count, per_token = reader.size(key, count), reader.size("num_experts_per_tok", per_token)
    if per_token > count:
        raise CheckpointError(
            f"{reader.where('num_experts_per_tok')}: {per_token} of {count} experts are too many"
        )
    return Experts(
        layers=layers,
        count=count,
        per_token=per_token,
        intermediate_size=reader.size("moe_intermediate_size", intermediate_size),
        renormalize=renormalize,
    )


def sparse_layers(reader: ConfigReader, layers: int) -> frozenset[int]:
    """Return the layers that have experts: every so many, but for those that are named."""
    dense = reader.get("mlp_only_layers", [], list)
    step = reader.size("decoder_sparse_step", 1)
    return frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
