"""What a runtime needs of a model: tokens in, hidden states out.

Shape letters: T tokens of the batch, C channels (hidden size).
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rose.kernels.attention.base import AttentionSpec
    from rose.kernels.recurrence import StateSpec
    from rose.models.batch import TokenBatch


class Backbone(Protocol):
    """A model without heads.

    `max_positions` is how many tokens its positions were made for. `attention_specs` has one entry
    per layer of attention, in order: what the attention back end and the page pool have to serve.
    A model with layers that carry a state from token to token has `state_specs` too.
    """

    hidden_size: int
    vocab_size: int
    max_positions: int
    attention_specs: "list[AttentionSpec]"

    def __call__(self, batch: "TokenBatch") -> "Tensor":
        """Compute the hidden states [T, C] of packed tokens, in the weights' dtype."""
        ...


def state_specs(backbone: Backbone) -> "Sequence[StateSpec]":
    """Return the facts of the layers that carry a state along; most models have none."""
    return getattr(backbone, "state_specs", ())
