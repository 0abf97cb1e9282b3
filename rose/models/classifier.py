"""Scores of whole sequences: classification heads, and the yes or no of a language model.

Everything after the backbone is in float32. Shape letters: T tokens, B sequences, C channels,
L labels.
"""

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.kernels import pooling
from rose.models.heads import cap_logits
from rose.models.layers import LayerNorm, Linear

if TYPE_CHECKING:
    from rose.models.backbone import Backbone
    from rose.models.batch import TokenBatch
    from rose.models.classifier_config import ClassifierHead


class Classifier(Protocol):
    """Tokens in, one raw score per label and sequence out."""

    num_labels: int

    def __call__(self, batch: "TokenBatch", cu_seqlens: Tensor) -> Tensor:
        """Compute raw scores (logits), before any activation.

        Args:
            batch: T tokens of B sequences.
            cu_seqlens: where each sequence starts, and T: integers [B + 1].

        Returns:
            float32 [B, L].
        """
        ...


class SequenceClassifier(nn.Module):
    """A backbone with a classification head."""

    def __init__(self, backbone: "Backbone", head: "ClassifierHead", num_labels: int) -> None:
        """Declare the head's weights."""
        super().__init__()
        self.backbone = backbone
        self.num_labels = num_labels
        self.head = Head(head, backbone.hidden_size, num_labels)

    def forward(self, batch: "TokenBatch", cu_seqlens: Tensor) -> Tensor:
        """Return raw scores, float32 [B, L]."""
        return self.head(self.backbone(batch), batch.input_ids, cu_seqlens)


class Head(nn.Module):
    """Pooling, then one layer or two."""

    def __init__(self, head: "ClassifierHead", size: int, num_labels: int) -> None:
        """Declare the weights that `head` names."""
        super().__init__()
        self.pooling = head.pooling
        self.pad_id = head.pad_id
        self.dense: Linear | None = None
        self.norm: LayerNorm | None = None
        if head.dense is not None:
            self.dense = Linear(
                head.dense, size, size, bias=head.dense_bias, activation=head.activation
            )
        if head.norm is not None:
            self.norm = LayerNorm(head.norm, size, head.norm_eps, bias=head.norm_bias)
        self.output = Linear(head.output, size, num_labels, bias=head.output_bias)

    def forward(self, x_TC: Tensor, ids_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return raw scores, float32 [B, L]."""
        x_BC = self._pool(x_TC, ids_T, cu_seqlens)
        if self.dense is not None:
            x_BC = self.dense(x_BC)
        if self.norm is not None:
            x_BC = self.norm(x_BC)
        return self.output(x_BC)

    def _pool(self, x_TC: Tensor, ids_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        if self.pooling != "last" or self.pad_id is None:
            return pooling.POOLINGS[self.pooling](x_TC, cu_seqlens, None)
        return x_TC.index_select(0, last_rows(ids_T, cu_seqlens, self.pad_id)).float()


def last_rows(ids_T: Tensor, cu_seqlens: Tensor, pad_id: int) -> Tensor:
    """Return the row of each sequence's last token that is not `pad_id`, its first if none is."""
    length_B = cu_seqlens.diff().long()
    index_T = torch.arange(len(ids_T), device=ids_T.device)
    sequence_T = torch.repeat_interleave(length_B, output_size=len(ids_T))
    candidate_T = torch.where(ids_T != pad_id, index_T, 0)
    first_B = cu_seqlens[:-1].long().clamp(max=max(0, len(ids_T) - 1))
    return first_B.scatter_reduce(0, sequence_T, candidate_T, "amax")


class YesNoClassifier(nn.Module):
    """The score of a causal language model: the logit of "yes" less that of "no" at the end.

    Only these two logits are computed, in float32: in half precision they come in coarse steps.
    """

    num_labels = 1

    def __init__(self, backbone: "Backbone", weight: Tensor, logit_cap: float | None) -> None:
        """Take the rows of the LM head, float32 [2, C] (or [1, C] where there is no "no")."""
        super().__init__()
        self.backbone = backbone
        self.logit_cap = logit_cap
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, batch: "TokenBatch", cu_seqlens: Tensor) -> Tensor:
        """Return yes - no, float32 [B, 1]."""
        logits = F.linear(pooling.last(self.backbone(batch), cu_seqlens), self.weight)
        logits = cap_logits(logits, self.logit_cap)
        return logits[:, :1] - logits[:, 1:].sum(dim=1, keepdim=True)
