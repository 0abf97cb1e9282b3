"""Heads on top of a backbone. Shape letters: N rows, C channels, V vocabulary."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rose.models.layers import Linear

if TYPE_CHECKING:
    from rose.models.backbone import Backbone
    from rose.models.batch import TokenBatch
    from rose.models.weights import NamedTensors

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class CausalLM(nn.Module):
    """A causal backbone with its LM head, which may be the token embedding itself."""

    def __init__(self, backbone: "Backbone", logit_cap: float | None = None) -> None:
        """Declare the head's weight [V, C]; logits x become cap * tanh(x / cap) with a cap."""
        super().__init__()
        self.backbone = backbone
        self.logit_cap = logit_cap
        self.lm_head = Linear("lm_head", backbone.hidden_size, backbone.vocab_size, bias=False)
        self.lm_head.needs_bytes = True  # and with it the token embedding, where both are one

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C] of packed tokens."""
        return self.backbone(batch)

    def logits(self, x_NC: Tensor) -> Tensor:
        """Return float32 logits [N, V] of some rows of the hidden states."""
        return cap_logits(self.lm_head(x_NC).float(), self.logit_cap)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Bound logits softly, where there is a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def share_stored_embedding(named: "NamedTensors") -> None:
    """Let an LM head that is stored alone be the token embedding too, as tied weights are."""
    if EMBEDDING not in named and LM_HEAD in named:
        named.names[EMBEDDING] = named.names[LM_HEAD]


def head_tensor(named: "NamedTensors", *, tied: bool) -> tuple[str | None, str | None]:
    """Say which tensor is the LM head, `EMBEDDING` or `LM_HEAD`, and warn of a contradiction.

    None where there is no head: random numbers are none. Tied weights that are stored twice and
    differ are not tied, as in transformers.
    """
    if not tied:
        return (LM_HEAD if LM_HEAD in named else None), None
    if LM_HEAD not in named or named.names[LM_HEAD] == named.names[EMBEDDING] or _equal(named):
        return EMBEDDING, None
    return LM_HEAD, (
        "tie_word_embeddings is true, but the LM head that is stored differs from the token "
        "embedding: both are used as they are"
    )


def _equal(named: "NamedTensors") -> bool:
    head, embedding = (named.tensors.get(named.names[name]) for name in (LM_HEAD, EMBEDDING))
    # Of meta tensors only headers are known.
    return head.shape == embedding.shape and (head.is_meta or torch.equal(head, embedding))
