"""Hybrid decoders: gated delta nets (Yang et al., 2024) beside gated full attention.

Qwen3-Next and Qwen3.5 differ in how a checkpoint stores the projections of a delta net alone.

Shape letters: T tokens of the batch, C channels, H query heads, K key/value heads, D head size,
R rotary channels; of a delta net: G key heads, N value heads, Q channels of a key, V channels of a
value, M = 2 G Q + N V channels of the convolution, W its width.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from rose.kernels.activation import activate
from rose.kernels.attention.base import AttentionSpec
from rose.kernels.heads import HeadNorms, attend_heads
from rose.kernels.recurrence import StateSpec
from rose.models.decoder import GatedMLP, Rotation, make_norm
from rose.models.experts import SparseMLP
from rose.models.hybrid_config import LINEAR
from rose.models.layers import (
    Embedding,
    Linear,
    PackedLinear,
    Part,
    RMSNorm,
    WeightedModule,
    known_activation,
)
from rose.models.rotary import RotaryEmbedding
from rose.models.windows import FULL

if TYPE_CHECKING:
    from rose.models.batch import TokenBatch
    from rose.models.hybrid_config import HybridConfig


class HybridModel(nn.Module):
    """The layers without the LM head; its output is the final norm's.

    `attention_specs` are those of the layers of full attention, `state_specs` those of the others.
    Each kind is counted by itself: a page pool has no room for layers without keys.
    """

    def __init__(self, config: "HybridConfig") -> None:
        """Declare all weights of `config`."""
        super().__init__()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.embedding = Embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.rope = RotaryEmbedding(config.ropes[FULL])
        mixers = [self._make_mixer(config, index) for index in range(config.num_layers)]
        layers = (HybridLayer(config, index, mixer) for index, mixer in enumerate(mixers))
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm("norm", config.hidden_size, config)
        self.attention_specs = [m.spec for m in mixers if isinstance(m, GatedAttention)]
        self.state_specs = [m.spec for m in mixers if isinstance(m, GatedDeltaNet)]

    def make_projection(self, name: str, config: "HybridConfig") -> "DeltaProjection":
        """Declare the weights that a delta net takes its input through."""
        raise NotImplementedError

    def _make_mixer(self, config: "HybridConfig", index: int) -> "GatedDeltaNet | GatedAttention":
        """Declare the weights by which layer `index` mixes tokens."""
        kind = config.layer_types[index]
        number = config.layer_types[:index].count(kind)
        if kind == LINEAR:
            name = f"layers.{index}.linear_attn"
            return GatedDeltaNet(name, config, number, self.make_projection(name, config))
        return GatedAttention(f"layers.{index}.self_attn", config, number)

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        rotation = self.rope(batch.positions)
        x_TC = self.embedding(batch.input_ids)
        residual_TC = None
        for layer in self.layers:
            x_TC, residual_TC = layer(x_TC, residual_TC, rotation, batch)
        return x_TC if residual_TC is None else self.norm.add(x_TC, residual_TC)[0]


class HybridLayer(nn.Module):
    """A mixer of tokens and an MLP, each behind a norm, which adds the residual before it."""

    def __init__(
        self, config: "HybridConfig", index: int, mixer: "GatedDeltaNet | GatedAttention"
    ) -> None:
        """Declare the weights of layer `index` beside its mixer."""
        super().__init__()
        name, size = f"layers.{index}", config.hidden_size
        self.mixer_norm = make_norm(f"{name}.input_layernorm", size, config)
        self.mixer = mixer
        self.mlp_norm = make_norm(f"{name}.post_attention_layernorm", size, config)
        self.mlp = _make_mlp(f"{name}.mlp", config, index)

    def forward(
        self, x_TC: Tensor, residual_TC: Tensor | None, rotation: Rotation, batch: "TokenBatch"
    ) -> tuple[Tensor, Tensor]:
        """Return the MLP's output and the residual to add to it."""
        if residual_TC is None:
            normed_TC, residual_TC = self.mixer_norm(x_TC), x_TC
        else:
            normed_TC, residual_TC = self.mixer_norm.add(x_TC, residual_TC)
        mixed_TC = self.mixer(normed_TC, rotation, batch)
        normed_TC, residual_TC = self.mlp_norm.add(mixed_TC, residual_TC)
        return self.mlp(normed_TC), residual_TC


def _make_mlp(name: str, config: "HybridConfig", index: int) -> nn.Module:
    if config.experts is not None and index in config.experts.layers:
        return SharedExpertMLP(name, config)
    return GatedMLP(name, config)


class SharedExpertMLP(SparseMLP):
    """Experts, and beside them an MLP that every token passes through, behind a gate."""

    def __init__(self, name: str, config: "HybridConfig") -> None:
        """Declare the router, the experts, and the shared one with its gate."""
        assert config.experts is not None
        assert config.shared_expert_size is not None
        super().__init__(name, config, config.experts)
        shared = replace(config, intermediate_size=config.shared_expert_size)
        self.shared = GatedMLP(f"{name}.shared_expert", shared)
        self.gate = Linear(f"{name}.shared_expert_gate", config.hidden_size, 1, bias=False)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return [T, C]."""
        return super().forward(x_TC) + self.gate(x_TC).sigmoid() * self.shared(x_TC)


class GatedAttention(nn.Module):
    """Grouped-query attention whose output is gated channel by channel."""

    def __init__(self, name: str, config: "HybridConfig", number: int) -> None:
        """Declare the projections; the layer is `number` among those with keys and values."""
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.spec = AttentionSpec(
            layer=number,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=dim,
            scale=config.scale,
            causal=True,
        )
        widths = [2 * config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        packed = [f"{name}.{part}_proj" for part in "qkv"]
        self.qkv = PackedLinear(packed, size, widths, bias=config.qkv_bias)
        self.q_norm = make_norm(f"{name}.q_norm", dim, config)
        self.k_norm = make_norm(f"{name}.k_norm", dim, config)
        heads = config.num_heads * dim
        self.output = Linear(f"{name}.o_proj", heads, size, bias=config.output_bias)

    def forward(self, x_TC: Tensor, rotation: Rotation, batch: "TokenBatch") -> Tensor:
        """Return [T, C]."""
        dim = self.spec.head_dim
        q_T, k_T, v_T = self.qkv.split(x_TC)
        q_THD, gate_THD = q_T.unflatten(1, (-1, 2 * dim)).chunk(2, dim=-1)  # head by head
        k_TKD, v_TKD = k_T.unflatten(1, (-1, dim)), v_T.unflatten(1, (-1, dim))
        norms = HeadNorms(
            self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset
        )
        out_THD = attend_heads(q_THD, k_TKD, v_TKD, rotation, norms, batch.attention, self.spec)
        return self.output((out_THD * gate_THD.sigmoid()).flatten(1))


class DeltaInput(NamedTuple):
    """What a delta net makes of its input, token by token."""

    qkv: Tensor  # [T, M], queries, keys and values before the convolution
    gate: Tensor  # [T, N, V], of the output
    beta: Tensor  # [T, N], before the sigmoid
    time: Tensor  # [T, N], how much of the state is forgotten


class DeltaProjection(nn.Module):
    """The projections into a delta net."""

    def forward(self, x_TC: Tensor) -> DeltaInput:
        """Return what the net needs of [T, C]."""
        raise NotImplementedError


class GatedDeltaNet(nn.Module):
    """Linear attention: a state per head that each token corrects, and reads."""

    def __init__(
        self, name: str, config: "HybridConfig", number: int, projection: DeltaProjection
    ) -> None:
        """Declare the weights; the layer is `number` among those with a state."""
        super().__init__()
        net = config.delta_net
        keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
        self.widths = (keys, keys, values)
        self.activation = known_activation(config.activation)
        self.spec = StateSpec(
            layer=number,
            conv_channels=sum(self.widths),
            conv_width=net.conv_width,
            num_heads=net.value_heads,
            key_dim=net.key_dim,
            value_dim=net.value_dim,
        )
        self.projection = projection
        self.weights = DeltaWeights(name, self.spec)
        self.norm = RMSNorm(f"{name}.norm", net.value_dim, config.norm_eps)
        self.output = Linear(f"{name}.out_proj", values, config.hidden_size, bias=False)

    def forward(self, x_TC: Tensor, _: Rotation, batch: "TokenBatch") -> Tensor:
        """Return [T, C]."""
        recurrence, spec = batch.recurrence, self.spec
        assert recurrence is not None, "a runtime did not plan what this model needs"
        qkv_TM, gate_TNV, beta_TN, time_TN = self.projection(x_TC)
        qkv_TM = recurrence.convolve(qkv_TM, self.weights.conv.squeeze(1), spec)
        q_T, k_T, v_T = activate(qkv_TM, self.activation).split(self.widths, dim=-1)
        q_TGQ, k_TGQ = (x.unflatten(1, (-1, spec.key_dim)) for x in (q_T, k_T))
        out_TNV = recurrence.apply_delta_rule(
            q_TGQ,
            k_TGQ,
            v_T.unflatten(1, (-1, spec.value_dim)),
            self.weights.decay(time_TN),
            beta_TN.sigmoid(),
            spec,
        )
        gated_TNV = self.norm(out_TNV) * F.silu(gate_TNV.float())
        return self.output(gated_TNV.to(x_TC.dtype).flatten(1))


class DeltaWeights(WeightedModule):
    """What a delta net has beside projections."""

    conv: Tensor  # [M, 1, W]
    log_rate: Tensor  # [N]
    time_bias: Tensor  # [N]

    def __init__(self, name: str, spec: StateSpec) -> None:
        """Declare the weights of the convolution, and by how much each head forgets."""
        super().__init__()
        shape = (spec.conv_channels, 1, spec.conv_width)
        self.declare("conv", Part(f"{name}.conv1d.weight", shape))
        self.declare("log_rate", Part(f"{name}.A_log", (spec.num_heads,)))
        self.declare("time_bias", Part(f"{name}.dt_bias", (spec.num_heads,)))

    def decay(self, time_TN: Tensor) -> Tensor:
        """Return the logarithm of what is left of each state, float32 [T, N]."""
        steps_TN = F.softplus(time_TN.float() + self.time_bias.float())
        return -self.log_rate.float().exp() * steps_TN
