"""A mixture of experts: each token passes through a few gated MLPs of many.

Shape letters: T tokens of the batch, C channels, E experts, K experts of a token, N tokens of an
expert.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rose.models.layers import GatedLinear, Linear

if TYPE_CHECKING:
    from rose.models.decoder_config import DecoderConfig, Experts


class SparseMLP(nn.Module):
    """A router that chooses experts for each token, and the sum of what they say."""

    def __init__(self, name: str, config: "DecoderConfig", experts: "Experts") -> None:
        """Declare the router and the experts."""
        super().__init__()
        self.per_token = experts.per_token
        self.renormalize = experts.renormalize
        self.router = Linear(f"{name}.gate", config.hidden_size, experts.count, bias=False)
        size, inner = config.hidden_size, experts.intermediate_size
        self.experts = nn.ModuleList(
            Expert(f"{name}.experts.{index}", size, inner, config.activation)
            for index in range(experts.count)
        )

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return [T, C].

        Experts work one after the other, each on its tokens, so that a token's sum is in the same
        order in every batch.
        """
        shares_TK, chosen_TK = self._route(x_TC)
        order = chosen_TK.flatten().argsort(stable=True)
        token_of = order // self.per_token
        share_of = shares_TK.flatten()[order].unsqueeze(1)
        counts = torch.bincount(chosen_TK.flatten(), minlength=len(self.experts)).tolist()
        out_TC = torch.zeros_like(x_TC)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = token_of[start : start + count]
                y_NC = self.experts[expert](x_TC.index_select(0, rows))
                out_TC.index_add_(0, rows, y_NC * share_of[start : start + count])
                start += count
        return out_TC

    def _route(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares and the numbers of each token's experts, [T, K] each."""
        probabilities_TE = self.router(x_TC).softmax(-1, dtype=torch.float32)
        shares_TK, chosen_TK = probabilities_TE.topk(self.per_token, dim=-1)
        if self.renormalize:
            shares_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
        return shares_TK.to(x_TC.dtype), chosen_TK


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, name: str, size: int, inner: int, activation: str) -> None:
        """Declare the projections."""
        super().__init__()
        packed = (f"{name}.gate_proj", f"{name}.up_proj")
        self.gate_up = GatedLinear(*packed, size, inner, bias=False, activation=activation)
        self.down = Linear(f"{name}.down_proj", inner, size, bias=False)

    def forward(self, x_NC: Tensor) -> Tensor:
        """Return what the expert makes of its tokens, [N, C]."""
        return self.down(self.gate_up(x_NC))
