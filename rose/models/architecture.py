"""What ROSE has to know of an architecture before any weight is read. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rose.models.classifier_config import ClassifierHead
from rose.models.config import ConfigReader
from rose.models.masked_lm_config import MaskedHead

# Pairs of a stored projection's name and the names of those that it holds, in their order.
Fused = tuple[tuple[str, tuple[str, ...]], ...]


class ModelConfig(Protocol):
    """What every architecture's config tells, whatever else it holds."""

    @property
    def hidden_size(self) -> int:
        """Channels of a hidden state."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of the backbone."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens that the positions were made for, special tokens included."""
        ...

    @property
    def stated_positions(self) -> int:
        """`max_position_embeddings` as the config states it."""
        ...

    @property
    def learned_positions(self) -> bool:
        """Whether positions are rows of a table, so that nothing longer can be computed at all."""
        ...

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        ...

    @property
    def segments(self) -> int:
        """Kinds of segments that tokens can belong to; 0 where there is no such thing."""
        ...

    @property
    def cached_positions(self) -> int | None:
        """Tokens up to which keys can be kept for later tokens; None is any number.

        Beyond it, the rotation of a key depends on how long the sequence becomes.
        """
        ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """One entry of the registry.

    `read_config` turns config.json into the architecture's config. `backbone` is the model class as
    "module:class", called with that config. `ignored` are patterns (full matches) of tensors that
    the backbone has no use for. `fused` names tensors that hold several projections, one behind the
    other: the projection's name there, and the names that the model knows the parts by. `lm_head`
    says whether causal LMs of this architecture exist, `tie_default` whether they share it with the
    token embedding where the config says nothing. `classifier` reads the facts of the head of
    sequence classifiers, None where there are none; `masked_lm` those of the head of masked
    language models, None where ROSE does not know it. `text_key` names the object of config.json
    that holds the settings of the language model, where they are not at its top.
    """

    name: str
    read_config: Callable[[ConfigReader], ModelConfig]
    backbone: str
    ignored: tuple[str, ...] = ()
    fused: Fused = ()
    lm_head: bool = False
    tie_default: bool = False
    classifier: Callable[[ConfigReader], ClassifierHead] | None = None
    masked_lm: Callable[[ConfigReader], MaskedHead] | None = None
    text_key: str | None = None
