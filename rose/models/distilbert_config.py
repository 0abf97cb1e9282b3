"""DistilBERT's config.json, which has names of its own. Free of torch."""

from rose.models.architecture import Architecture
from rose.models.classifier_config import ClassifierHead
from rose.models.config import ConfigReader
from rose.models.encoder_config import EncoderConfig, head_size
from rose.models.errors import CheckpointError
from rose.models.masked_lm_config import distilbert_masked_head


def read_distilbert_config(reader: ConfigReader) -> EncoderConfig:
    """Read config.json with the defaults of `transformers.DistilBertConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    if reader.get("sinusoidal_pos_embds", False, bool):
        raise CheckpointError(f"{reader.file}: sinusoidal_pos_embds: true is not supported")
    hidden, heads = reader.size("dim", 768), reader.size("n_heads", 12)
    positions = reader.size("max_position_embeddings", 512)
    return EncoderConfig(
        vocab_size=reader.size("vocab_size", 30522),
        hidden_size=hidden,
        num_layers=reader.size("n_layers", 6),
        num_heads=heads,
        head_dim=head_size(reader, hidden, heads),
        intermediate_size=reader.size("hidden_dim", 4 * 768),
        activation=reader.get("activation", "gelu", str),
        norm_eps=1e-12,
        type_vocab_size=0,
        max_positions=positions,
        stated_positions=positions,
    )


def distilbert_head(_: ConfigReader) -> ClassifierHead:
    """Return the facts of the classification head."""
    return ClassifierHead("cls", "classifier", dense="pre_classifier", activation="relu")


DISTILBERT = Architecture(
    name="distilbert",
    read_config=read_distilbert_config,
    backbone="rose.models.distilbert:DistilBertModel",
    ignored=(r"embeddings\.position_ids", r"vocab_(transform|layer_norm|projector)\..+"),
    classifier=distilbert_head,
    masked_lm=distilbert_masked_head,
)
