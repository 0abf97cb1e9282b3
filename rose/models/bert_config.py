"""BERT's config.json. Free of torch."""

from rose.models.architecture import Architecture
from rose.models.classifier_config import pooler_head
from rose.models.config import ConfigReader
from rose.models.encoder_config import IGNORED, EncoderConfig, read_encoder_config
from rose.models.masked_lm_config import bert_masked_head


def read_bert_config(reader: ConfigReader) -> EncoderConfig:
    """Read config.json with the defaults of `transformers.BertConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    return read_encoder_config(reader, vocab_size=30522)


BERT = Architecture(
    name="bert",
    read_config=read_bert_config,
    backbone="rose.models.bert:BertModel",
    ignored=IGNORED,
    classifier=pooler_head,
    masked_lm=bert_masked_head,
)
