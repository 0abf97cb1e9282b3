"""The input of a forward pass: packed tokens, those of all sequences one after another."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.attention.base import AttentionBatch
    from rose.kernels.recurrence import RecurrentBatch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed tokens and the attention planned for them.

    `input_ids` int64 [T]; `positions` int64 [T], counted from 0 within each sequence (a model with
    another origin adds its offset); `token_type_ids` int64 [T], or None where all are 0.
    `recurrence` is for layers that carry a state from token to token, None where no layer does.
    """

    input_ids: "Tensor"
    positions: "Tensor"
    attention: "AttentionBatch"
    token_type_ids: "Tensor | None" = None
    recurrence: "RecurrentBatch | None" = None
