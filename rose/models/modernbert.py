"""ModernBERT (Warner et al., 2024): a pre-norm encoder with rotary positions.

Most layers see a window around each token, every third the whole text; the two kinds rotate by
different bases.

Shape letters: T tokens of the batch, C channels, H heads, D head size.
"""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rose.kernels.attention.base import AttentionSpec
from rose.kernels.heads import attend_heads
from rose.kernels.norm import add_layer_norm_with_sum
from rose.models.layers import Embedding, GatedLinear, LayerNorm, Linear, PackedLinear
from rose.models.modernbert_config import SLIDING
from rose.models.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from rose.kernels.attention.base import AttentionBatch
    from rose.models.batch import TokenBatch
    from rose.models.modernbert_config import ModernBertConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, D] each


class ModernBertModel(nn.Module):
    """The encoder; its output is the final norm's."""

    def __init__(self, config: "ModernBertConfig") -> None:
        """Declare all weights of `config`."""
        super().__init__()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        size = config.hidden_size
        self.words = Embedding("embeddings.tok_embeddings", config.vocab_size, size)
        self.norm = _norm("embeddings.norm", config)
        ropes = {kind: RotaryEmbedding(rope) for kind, rope in config.ropes.items()}
        self.ropes = nn.ModuleDict(ropes)
        layers = [ModernBertLayer(config, index) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.layer_types = config.layer_types
        self.final_norm = _norm("final_norm", config)
        self.attention_specs = [layer.attention.spec for layer in layers]

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        rotations = {kind: rope(batch.positions) for kind, rope in self.ropes.items()}
        residual_TC = self.norm(self.words(batch.input_ids))
        x_TC: Tensor | None = None
        for kind, layer in zip(self.layer_types, self.layers, strict=True):
            x_TC, residual_TC = layer(x_TC, residual_TC, rotations[kind], batch.attention)
        assert x_TC is not None, "a config has at least one layer"
        return self.final_norm.add(x_TC, residual_TC)


class ModernBertLayer(nn.Module):
    """Attention and MLP, each behind a norm; the first layer's attention has none."""

    def __init__(self, config: "ModernBertConfig", index: int) -> None:
        """Declare the weights of layer `index`."""
        super().__init__()
        name = f"layers.{index}"
        self.attention_norm = _norm(f"{name}.attn_norm", config) if index else None
        self.attention = ModernBertAttention(config, index)
        self.mlp_norm = _norm(f"{name}.mlp_norm", config)
        self.mlp = ModernBertMLP(f"{name}.mlp", config)

    def forward(
        self,
        x_TC: Tensor | None,
        residual_TC: Tensor,
        rotation: Rotation,
        attention: "AttentionBatch",
    ) -> tuple[Tensor, Tensor]:
        """Return the MLP's output and the residual to add to it; the first `x_TC` is None."""
        if x_TC is None or self.attention_norm is None:
            normed_TC = residual_TC
        else:
            normed_TC, residual_TC = _add(self.attention_norm, x_TC, residual_TC)
        x_TC = self.attention(normed_TC, rotation, attention)
        normed_TC, residual_TC = _add(self.mlp_norm, x_TC, residual_TC)
        return self.mlp(normed_TC), residual_TC


class ModernBertAttention(nn.Module):
    """Self-attention with rotary positions, over the whole text or within a window."""

    def __init__(self, config: "ModernBertConfig", index: int) -> None:
        """Declare the projections of layer `index`; q, k and v are stored as `Wqkv`."""
        super().__init__()
        name, size, bias = f"layers.{index}.attn", config.hidden_size, config.attention_bias
        is_local = config.layer_types[index] == SLIDING
        self.spec = AttentionSpec(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            causal=False,
            window=(config.window, config.window) if is_local else (None, None),
        )
        packed = [f"{name}.{part}_proj" for part in "qkv"]
        self.qkv = PackedLinear(packed, size, [size] * 3, bias=bias)
        self.output = Linear(f"{name}.Wo", size, size, bias=bias)

    def forward(self, x_TC: Tensor, rotation: Rotation, attention: "AttentionBatch") -> Tensor:
        """Return [T, C]."""
        heads = (self.spec.num_heads, self.spec.head_dim)
        q_THD, k_THD, v_THD = (part_TC.unflatten(1, heads) for part_TC in self.qkv.split(x_TC))
        out_THD = attend_heads(q_THD, k_THD, v_THD, rotation, None, attention, self.spec)
        return self.output(out_THD.flatten(1))


class ModernBertMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are stored as `Wi`."""

    def __init__(self, name: str, config: "ModernBertConfig") -> None:
        """Declare the three projections, gate and up as one."""
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        packed, activation = (f"{name}.gate", f"{name}.up"), config.activation
        self.gate_up = GatedLinear(*packed, size, inner, bias=bias, activation=activation)
        self.down = Linear(f"{name}.Wo", inner, size, bias=bias)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return [T, C]."""
        return self.down(self.gate_up(x_TC))


def _norm(name: str, config: "ModernBertConfig") -> LayerNorm:
    return LayerNorm(name, config.hidden_size, config.norm_eps, bias=config.norm_bias)


def _add(norm: LayerNorm, x_TC: Tensor, residual_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normed sum of both, and the sum: the next residual."""
    return add_layer_norm_with_sum(x_TC, residual_TC, norm.weight, norm.bias, norm.eps)
