"""Heads of sequence classifiers, as facts. Free of torch."""

import re
from dataclasses import dataclass

from rose.models.config import ConfigReader
from rose.models.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """How hidden states become one score per label.

    `pooling` is "cls", "mean" or "last" (the last token that is not `pad_id`). Then, where they are
    named, a dense layer with `activation` and a layer norm; then `output`.
    """

    pooling: str
    output: str
    output_bias: bool = True
    dense: str | None = None
    dense_bias: bool = True
    activation: str = "identity"
    norm: str | None = None
    norm_bias: bool = False
    norm_eps: float = 1e-5
    pad_id: int | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Patterns of the head's tensors, for those who load the backbone alone."""
        names = [name for name in (self.dense, self.norm, self.output) if name is not None]
        return tuple(rf"{re.escape(name)}\.(weight|bias)" for name in names)


def pooler_head(_: ConfigReader) -> ClassifierHead:
    """BERT's: the pooler, then the classifier."""
    return ClassifierHead("cls", "classifier", dense="pooler.dense", activation="tanh")


def dense_head(_: ConfigReader) -> ClassifierHead:
    """RoBERTa's: two layers of its own."""
    return ClassifierHead("cls", "classifier.out_proj", dense="classifier.dense", activation="tanh")


def last_token_head(reader: ConfigReader) -> ClassifierHead:
    """A decoder's: one layer on the last token."""
    pad_id = reader.optional("pad_token_id", int)
    return ClassifierHead("last", "score", output_bias=False, pad_id=pad_id)


def read_labels(reader: ConfigReader) -> tuple[str, ...]:
    """Return the labels' names in their order.

    Raises:
        CheckpointError: `id2label` is malformed.
    """
    stated = reader.optional("id2label", dict, record=False)
    if stated is None:
        count = reader.size("num_labels", 2)
        return tuple(f"LABEL_{index}" for index in range(count))
    labels = {str(key): value for key, value in stated.items()}
    names = tuple(labels.get(str(index)) for index in range(len(labels)))
    if not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{reader.where('id2label')}: names of labels by number from 0 are expected, "
            f"found {stated}"
        )
    return tuple(map(str, names))
