"""config.json of RoBERTa and XLM-RoBERTa. Free of torch."""

from functools import partial

from rose.models.architecture import Architecture
from rose.models.classifier_config import dense_head
from rose.models.config import ConfigReader
from rose.models.encoder_config import (
    IGNORED,
    EncoderConfig,
    leave_out_padding,
    read_encoder_config,
)
from rose.models.masked_lm_config import roberta_masked_head


def read_roberta_config(vocab_size: int, reader: ConfigReader) -> EncoderConfig:
    """Read config.json with the defaults of `transformers.RobertaConfig`.

    The first rows of the position table, up to that of the pad token, are not for tokens.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    config = read_encoder_config(reader, vocab_size=vocab_size)
    return leave_out_padding(config, reader, reader.get("pad_token_id", 1, int))


ROBERTA = Architecture(
    name="roberta",
    read_config=partial(read_roberta_config, 50265),
    backbone="rose.models.roberta:RobertaModel",
    ignored=IGNORED,
    classifier=dense_head,
    masked_lm=roberta_masked_head,
)
XLM_ROBERTA = Architecture(
    name="xlm-roberta",
    read_config=partial(read_roberta_config, 30522),
    backbone="rose.models.roberta:RobertaModel",
    ignored=IGNORED,
    classifier=dense_head,
    masked_lm=roberta_masked_head,
)
