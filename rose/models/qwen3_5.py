"""Qwen3.5 (Qwen Team, 2026), the language model: a hybrid decoder, dense or with experts.

Shape letters: T tokens of the batch, C channels, N value heads, V channels of a value.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from rose.models.hybrid import DeltaInput, DeltaProjection, HybridModel
from rose.models.layers import PackedLinear

if TYPE_CHECKING:
    from rose.models.hybrid_config import HybridConfig


class Qwen35Model(HybridModel):
    """The layers without the LM head; its output is the final norm's."""

    def make_projection(self, name: str, config: "HybridConfig") -> DeltaProjection:
        """Declare the weights that a delta net takes its input through."""
        return SeparateProjection(name, config)


class SeparateProjection(DeltaProjection):
    """Queries, keys and values of all heads, then their gates, betas and times."""

    def __init__(self, name: str, config: "HybridConfig") -> None:
        """Declare the four matrices, which are applied as one."""
        super().__init__()
        net = config.delta_net
        self.value_dim = net.value_dim
        keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
        packed = [f"{name}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        widths = [2 * keys + values, values, net.value_heads, net.value_heads]
        self.projection = PackedLinear(packed, config.hidden_size, widths, bias=False)

    def forward(self, x_TC: Tensor) -> DeltaInput:
        """Return what the net needs of [T, C]."""
        qkv_TM, gate_T, beta_TN, time_TN = self.projection.split(x_TC)
        return DeltaInput(qkv_TM, gate_T.unflatten(1, (-1, self.value_dim)), beta_TN, time_TN)
