"""A mixture of experts: each token passes through a few gated MLPs of many.

Shape letters: T tokens of the batch, C channels, I intermediate size of an expert, E experts,
K experts of a token, N tokens of an expert.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.kernels.activation import gated
from rose.models.layers import Linear, Part, WeightedModule, known_activation

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
        self.experts = ExpertWeights(f"{name}.experts", config, experts)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return [T, C].

        Experts work one after the other, each on its tokens, so that a token's sum is in the same
        order in every batch.
        """
        shares_TK, chosen_TK = self._route(x_TC)
        order = chosen_TK.flatten().argsort(stable=True)
        token_of = order // self.per_token
        share_of = shares_TK.flatten()[order].unsqueeze(1)
        counts = torch.bincount(chosen_TK.flatten(), minlength=self.experts.count).tolist()
        out_TC = torch.zeros_like(x_TC)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = token_of[start : start + count]
                y_NC = self.experts(x_TC.index_select(0, rows), expert)
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


class ExpertWeights(WeightedModule):
    """The gated MLPs of all experts."""

    gate_up: Tensor  # [E * 2 I, C]
    down: Tensor  # [E * C, I]

    def __init__(self, name: str, config: "DecoderConfig", experts: "Experts") -> None:
        """Declare the weights, those of one expert behind those of the other."""
        super().__init__()
        size, inner = config.hidden_size, experts.intermediate_size
        self.count = experts.count
        self.activation = known_activation(config.activation)
        names = [f"{name}.{index}" for index in range(experts.count)]
        pairs = [f"{expert}.{part}_proj.weight" for expert in names for part in ("gate", "up")]
        self.declare("gate_up", *(Part(weight, (inner, size)) for weight in pairs))
        downs = [f"{expert}.down_proj.weight" for expert in names]
        self.declare("down", *(Part(weight, (size, inner)) for weight in downs))

    def forward(self, x_NC: Tensor, expert: int) -> Tensor:
        """Return what one expert makes of its tokens, [N, C]."""
        gate_up = self.gate_up.unflatten(0, (self.count, -1))[expert]
        down = self.down.unflatten(0, (self.count, -1))[expert]
        return F.linear(gated(F.linear(x_NC, gate_up), self.activation), down)
