"""MPNet's config.json. Free of torch."""

from rose.models.architecture import Architecture
from rose.models.classifier_config import dense_head
from rose.models.config import ConfigReader
from rose.models.encoder_config import (
    IGNORED,
    EncoderConfig,
    leave_out_padding,
    read_encoder_config,
)
from rose.models.errors import CheckpointError

NUM_BUCKETS = 32  # the reference uses so many, whatever the config says
PAD_ID = 1  # the same


def read_mpnet_config(reader: ConfigReader) -> EncoderConfig:
    """Read config.json with the defaults of `transformers.MPNetConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    buckets = reader.size("relative_attention_num_buckets", NUM_BUCKETS)
    if buckets != NUM_BUCKETS:
        raise CheckpointError(
            f"{reader.file}: relative_attention_num_buckets: {buckets} is not supported, only "
            f"{NUM_BUCKETS}"
        )
    config = read_encoder_config(reader, vocab_size=30527, type_vocab_size=0)
    return leave_out_padding(config, reader, PAD_ID)


MPNET = Architecture(
    name="mpnet",
    read_config=read_mpnet_config,
    backbone="rose.models.mpnet:MPNetModel",
    ignored=IGNORED,
    classifier=dense_head,
)
