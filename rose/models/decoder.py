"""The Llama family: pre-norm decoders with a gated MLP, causal or bidirectional.

Llama, Mistral, Phi-3, Qwen2, Qwen3 and the first Gemma are values of `DecoderConfig`; Gemma 2 and
3, OLMo 2 and Qwen3's mixture of experts have layers of their own.

Shape letters: T tokens of the batch, C channels, I intermediate size, H query heads, K key/value
heads, D head size, R rotary channels.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rose.kernels import norm
from rose.kernels.attention.base import AttentionSpec
from rose.kernels.blocks import BlockParts, DecoderBlock, Norm, make_decoder_block
from rose.kernels.heads import HeadNorms, attend_heads
from rose.models.layers import (
    Embedding,
    FusableLayer,
    GatedLinear,
    Linear,
    PackedLinear,
    RMSNorm,
)
from rose.models.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from rose.kernels.attention.base import AttentionBatch
    from rose.models.batch import TokenBatch
    from rose.models.decoder_config import DecoderConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, R] each


class DecoderModel(nn.Module):
    """The layers without the LM head; its output is the final norm's."""

    embedding_scale: Tensor

    def __init__(self, config: "DecoderConfig") -> None:
        """Declare all weights of `config`."""
        super().__init__()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.embedding = Embedding("embed_tokens", config.vocab_size, config.hidden_size)
        ropes = {kind: RotaryEmbedding(rope) for kind, rope in config.ropes.items()}
        self.ropes = nn.ModuleDict(ropes)
        self.shares_rope = len(set(config.ropes.values())) == 1
        layers = [self.make_layer(config, index) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.layer_types = config.layer_types
        self.norm = make_norm("norm", config.hidden_size, config)
        self.logit_cap = config.logit_cap
        self.scales_embedding = config.embedding_scale != 1.0
        scale = torch.tensor(config.embedding_scale)
        self.register_buffer("embedding_scale", scale, persistent=False)
        self.attention_specs = [layer.attention.spec for layer in layers]

    def make_layer(self, config: "DecoderConfig", index: int) -> "DecoderLayer":
        """Declare the weights of layer `index`."""
        return DecoderLayer(config, index)

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        rotations = self._rotations(batch.positions)
        x_TC = self.embedding(batch.input_ids)
        if self.scales_embedding:
            x_TC = x_TC * self.embedding_scale.to(x_TC.dtype)  # rounded, as in training
        residual_TC: Tensor | None = None
        for kind, layer in zip(self.layer_types, self.layers, strict=True):
            x_TC, residual_TC = layer(x_TC, residual_TC, rotations[kind], batch.attention)
        return x_TC if residual_TC is None else self.norm.add(x_TC, residual_TC)[0]

    def _rotations(self, positions_T: Tensor) -> dict[str, Rotation]:
        """Compute the cosines and sines of each layer type, once where all types agree."""
        if not self.shares_rope:
            return {kind: rope(positions_T) for kind, rope in self.ropes.items()}
        first = next(iter(self.ropes.values()))
        return dict.fromkeys(self.ropes, first(positions_T))


class DecoderLayer(FusableLayer):
    """Attention and MLP, each behind a norm. The residual addition is part of the next norm."""

    norm_names = ("input_layernorm", "post_attention_layernorm")  # attention's and the MLP's

    def __init__(self, config: "DecoderConfig", index: int) -> None:
        """Declare the weights of layer `index`."""
        super().__init__()
        name, size = f"layers.{index}", config.hidden_size
        attention_norm, mlp_norm = self.norm_names
        self.attention_norm = make_norm(f"{name}.{attention_norm}", size, config)
        self.attention = self.make_attention(config, index)
        self.mlp_norm = make_norm(f"{name}.{mlp_norm}", size, config)
        self.mlp = self.make_mlp(config, index)
        self.block: DecoderBlock | None = None

    def make_attention(self, config: "DecoderConfig", index: int) -> "DecoderAttention":
        """Declare the weights of attention."""
        return DecoderAttention(config, index)

    def make_mlp(self, config: "DecoderConfig", index: int) -> nn.Module:
        """Declare the weights that follow attention."""
        return GatedMLP(f"layers.{index}.mlp", config)

    def forward(
        self,
        x_TC: Tensor,
        residual_TC: Tensor | None,
        rotation: Rotation,
        attention: "AttentionBatch",
    ) -> tuple[Tensor, Tensor]:
        """Return the MLP's output and the residual to add to it."""
        if self.block is not None:
            done = self.block(x_TC, residual_TC, rotation, attention)
            if done is not None:
                return done
        normed_TC, residual_TC = self.enter(x_TC, residual_TC)
        x_TC = self.attention(normed_TC, rotation, attention)
        normed_TC, residual_TC = self.mlp_norm.add(x_TC, residual_TC)
        return self.mlp(normed_TC), residual_TC

    def fuse(self) -> None:
        """Look for a kernel of the whole layer."""
        attention, mlp = self.attention, self.mlp
        if isinstance(mlp, GatedMLP):
            parts = BlockParts(
                qkv=attention.qkv.prepared,
                output=attention.output.prepared,
                spec=attention.spec,
                up=mlp.gate_up.prepared,
                down=mlp.down.prepared,
                attention_norm=_facts(self.attention_norm),
                mlp_norm=_facts(self.mlp_norm),
                head_norms=attention.head_norms(),
            )
            self.block = make_decoder_block(parts)

    def enter(self, x_TC: Tensor, residual_TC: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the input of attention and the residual; the first layer has none yet."""
        if residual_TC is None:
            return self.attention_norm(x_TC), x_TC
        return self.attention_norm.add(x_TC, residual_TC)


class DecoderAttention(nn.Module):
    """Grouped-query attention with rotary positions and, in Qwen3, normed queries and keys."""

    def __init__(self, config: "DecoderConfig", index: int) -> None:
        """Declare the projections of layer `index`."""
        super().__init__()
        name, size, dim = f"layers.{index}.self_attn", config.hidden_size, config.head_dim
        self.spec = _attention_spec(config, index)
        widths = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        packed = [f"{name}.{part}_proj" for part in "qkv"]
        self.qkv = PackedLinear(packed, size, widths, bias=config.qkv_bias)
        self.output = Linear(f"{name}.o_proj", widths[0], size, bias=config.output_bias)
        self.norm_offset = config.norm_offset
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = make_norm(f"{name}.q_norm", dim, config)
            self.k_norm = make_norm(f"{name}.k_norm", dim, config)

    def forward(self, x_TC: Tensor, rotation: Rotation, attention: "AttentionBatch") -> Tensor:
        """Return [T, C]."""
        dim = self.spec.head_dim
        q_THD, k_TKD, v_TKD = (part.unflatten(1, (-1, dim)) for part in self.project(x_TC))
        norms = self.head_norms()
        out_THD = attend_heads(q_THD, k_TKD, v_TKD, rotation, norms, attention, self.spec)
        return self.output(out_THD.flatten(1))

    def project(self, x_TC: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values before the split into heads, [T, heads times D] each."""
        return self.qkv.split(x_TC)

    def head_norms(self) -> HeadNorms | None:
        """Return the norms of queries and keys, if there are any."""
        if self.q_norm is None or self.k_norm is None:
            return None
        weights = (self.q_norm.weight, self.k_norm.weight)
        return HeadNorms(*weights, self.q_norm.eps, self.norm_offset)


def _facts(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, None, norm.eps, norm.offset)


def _attention_spec(config: "DecoderConfig", index: int) -> AttentionSpec:
    windowed = config.layer_types[index] == "sliding_attention"
    return AttentionSpec(
        layer=index,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        causal=config.causal,
        window=config.window if windowed else (None, None),
        soft_cap=config.soft_cap,
    )


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, name: str, config: "DecoderConfig") -> None:
        """Declare the three projections, gate and up as one."""
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        packed, activation = (f"{name}.gate_proj", f"{name}.up_proj"), config.activation
        self.gate_up = GatedLinear(*packed, size, inner, bias=bias, activation=activation)
        self.down = Linear(f"{name}.down_proj", inner, size, bias=bias)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return [T, C]."""
        return self.down(self.gate_up(x_TC))


class OffsetRMSNorm(RMSNorm):
    """RMS norm that multiplies by an offset plus its weight, in float32."""

    def __init__(self, name: str, channels: int, eps: float, offset: float) -> None:
        """Declare the weight [channels]."""
        super().__init__(name, channels, eps)
        self.offset = offset

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return the normed `x_TC`."""
        return norm.rms_norm(x_TC, self.weight, self.eps, weight_offset=self.offset)

    def add(self, x_TC: Tensor, residual_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed sum of both, and the sum: the next residual."""
        offset = self.offset
        return norm.add_rms_norm(x_TC, residual_TC, self.weight, self.eps, weight_offset=offset)


def make_norm(name: str, channels: int, config: "DecoderConfig") -> RMSNorm:
    """Make a norm of the kind that the model has."""
    if config.norm_offset:
        return OffsetRMSNorm(name, channels, config.norm_eps, config.norm_offset)
    return RMSNorm(name, channels, config.norm_eps)
