"""Qwen3-Next (Qwen Team, 2025): a hybrid decoder with a mixture of experts.

Shape letters: T tokens of the batch, C channels, G key heads, N value heads, Q channels of a key, V
channels of a value.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rose.models.hybrid import DeltaInput, DeltaProjection, HybridModel
from rose.models.layers import PackedLinear

if TYPE_CHECKING:
    from rose.models.hybrid_config import HybridConfig


class Qwen3NextModel(HybridModel):
    """The layers without the LM head; its output is the final norm's."""

    def make_projection(self, name: str, config: "HybridConfig") -> DeltaProjection:
        """Declare the weights that a delta net takes its input through."""
        return InterleavedProjection(name, config)


class InterleavedProjection(DeltaProjection):
    """Key head by key head: query, key, and the values, gates, betas, times of its value heads."""

    def __init__(self, name: str, config: "HybridConfig") -> None:
        """Declare the two matrices, which are applied as one."""
        super().__init__()
        net = config.delta_net
        self.key_heads, self.value_dim = net.key_heads, net.value_dim
        repeats = net.value_heads // net.key_heads
        values = repeats * net.value_dim
        self.parts = (net.key_dim, net.key_dim, values, values)
        widths = [net.key_heads * sum(self.parts), net.key_heads * 2 * repeats]
        packed = [f"{name}.in_proj_qkvz", f"{name}.in_proj_ba"]
        self.projection = PackedLinear(packed, config.hidden_size, widths, bias=False)

    def forward(self, x_TC: Tensor) -> DeltaInput:
        """Return what the net needs of [T, C]."""
        qkvz_T, ba_T = self.projection.split(x_TC)
        parts = qkvz_T.unflatten(1, (self.key_heads, -1)).split(self.parts, dim=-1)
        q_T, k_T, v_T, gate_T = (part.flatten(1) for part in parts)
        beta_TN, time_TN = (
            part.flatten(1) for part in ba_T.unflatten(1, (self.key_heads, -1)).chunk(2, dim=-1)
        )
        gate_TNV = gate_T.unflatten(1, (-1, self.value_dim))
        return DeltaInput(torch.cat((q_T, k_T, v_T), dim=-1), gate_TNV, beta_TN, time_TN)
