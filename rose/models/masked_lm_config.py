"""Heads of masked language models, as facts: what SPLADE pools. Free of torch."""

from dataclasses import dataclass

from rose.models.config import ConfigReader


@dataclass(frozen=True, slots=True)
class MaskedHead:
    """The names of a head's tensors: activation(dense), norm, then a row for each token.

    `decoder` may be stored as the token embedding alone, its bias as `bias`.
    """

    dense: str
    norm: str
    decoder: str
    bias: str
    activation: str
    norm_eps: float


def bert_masked_head(reader: ConfigReader) -> MaskedHead:
    """BERT's."""
    return MaskedHead(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
        activation=reader.optional("hidden_act", str, record=False) or "gelu",
        norm_eps=reader.optional("layer_norm_eps", float, record=False) or 1e-12,
    )


def roberta_masked_head(reader: ConfigReader) -> MaskedHead:
    """RoBERTa's, whose activation is always GELU."""
    return MaskedHead(
        dense="lm_head.dense",
        norm="lm_head.layer_norm",
        decoder="lm_head.decoder",
        bias="lm_head.bias",
        activation="gelu",
        norm_eps=reader.optional("layer_norm_eps", float, record=False) or 1e-12,
    )


def distilbert_masked_head(reader: ConfigReader) -> MaskedHead:
    """DistilBERT's."""
    return MaskedHead(
        dense="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector",
        bias="vocab_projector.bias",
        activation=reader.optional("activation", str, record=False) or "gelu",
        norm_eps=1e-12,
    )
