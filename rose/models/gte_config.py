"""config.json of GTE v1.5 (`new` on the hub, `gte` in transformers). Free of torch."""

from dataclasses import replace

from rose.models.architecture import Architecture
from rose.models.classifier_config import pooler_head
from rose.models.config import ConfigReader
from rose.models.encoder_config import IGNORED, EncoderConfig, read_encoder_config
from rose.models.rope import RopeFacts, read_ropes


def read_gte_config(reader: ConfigReader) -> EncoderConfig:
    """Read config.json with the defaults of `transformers.GteConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    has_types = reader.values.get("type_vocab_size") != 0
    config = read_encoder_config(
        reader, vocab_size=250048, max_positions=8192, type_vocab_size=1 if has_types else 0
    )
    facts = RopeFacts(config.head_dim, config.max_positions, theta=160000.0)
    return replace(config, rope=read_ropes(reader, ("all",), facts)["all"], up_bias=False)


GTE = Architecture(
    name="gte",
    read_config=read_gte_config,
    backbone="rose.models.gte:GteModel",
    ignored=IGNORED,
    fused=(
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("up_gate_proj", ("up_proj", "gate_proj")),
    ),
    classifier=pooler_head,
)
