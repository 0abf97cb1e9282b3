"""Layers of the BERT family: attention, then an MLP, each followed by the norm of the sum.

The members differ in the names of their tensors, in their embeddings, and in a few facts of
`EncoderConfig`; each has a file of its own that says how.

Shape letters: T tokens of the batch, C channels, I intermediate size, H heads, D head size,
R rotary channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from rose.kernels.attention.base import AttentionSpec
from rose.kernels.blocks import BlockParts, EncoderBlock, Norm, make_encoder_block
from rose.kernels.embedding import embed_and_norm
from rose.kernels.heads import attend_heads
from rose.models.layers import (
    Embedding,
    FusableLayer,
    GatedLinear,
    LayerNorm,
    Linear,
    PackedLinear,
    Projection,
)
from rose.models.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from rose.kernels.attention.base import AttentionBatch, PositionBias
    from rose.models.batch import TokenBatch
    from rose.models.encoder_config import EncoderConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, R] each


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's tensors in the checkpoint, without ".weight" and ".bias".

    `gate` is given where the MLP has one.
    """

    qkv: tuple[str, str, str]
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    gate: str | None = None


def bert_names(index: int) -> LayerNames:
    """Name the tensors of a layer as BERT and RoBERTa do."""
    layer = f"encoder.layer.{index}"
    attention = f"{layer}.attention"
    return LayerNames(
        qkv=(f"{attention}.self.query", f"{attention}.self.key", f"{attention}.self.value"),
        output=f"{attention}.output.dense",
        attention_norm=f"{attention}.output.LayerNorm",
        up=f"{layer}.intermediate.dense",
        down=f"{layer}.output.dense",
        mlp_norm=f"{layer}.output.LayerNorm",
    )


class Encoder(nn.Module):
    """A stack of layers; what a member adds are its embeddings."""

    def __init__(
        self,
        config: "EncoderConfig",
        names: Callable[[int], LayerNames],
        bias: "PositionBias | None" = None,
    ) -> None:
        """Declare the layers of `config`; `names` gives those of a layer by its index."""
        super().__init__()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        indices = range(config.num_layers)
        layers = [self.make_layer(config, index, names(index), bias) for index in indices]
        self.layers = nn.ModuleList(layers)
        self.attention_specs = [layer.attention.spec for layer in layers]

    def make_layer(
        self,
        config: "EncoderConfig",
        index: int,
        names: LayerNames,
        bias: "PositionBias | None",
    ) -> "EncoderLayer":
        """Declare the weights of layer `index`."""
        return EncoderLayer(config, index, names, bias)

    def encode(self, x_TC: Tensor, batch: "TokenBatch", rotation: Rotation | None = None) -> Tensor:
        """Return the last layer's hidden states [T, C] of embedded tokens."""
        for layer in self.layers:
            x_TC = layer(x_TC, batch.attention, rotation)
        return x_TC


class RotaryEncoder(Encoder):
    """An encoder that knows positions by rotation alone; its output is the last layer's."""

    def __init__(
        self,
        config: "EncoderConfig",
        names: Callable[[int], LayerNames],
        norm: str = "embeddings.LayerNorm",
    ) -> None:
        """Declare all weights of `config`; `norm` is the name of the embeddings'."""
        super().__init__(config, names)
        assert config.rope is not None
        self.embeddings = WordEmbeddings(config, norm)
        self.rope = RotaryEmbedding(config.rope)

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        x_TC = self.embeddings(batch.input_ids, batch.positions, batch.token_type_ids)
        return self.encode(x_TC, batch, self.rope(batch.positions))


class EncoderLayer(FusableLayer):
    """Attention and MLP."""

    def __init__(
        self,
        config: "EncoderConfig",
        index: int,
        names: LayerNames,
        bias: "PositionBias | None" = None,
    ) -> None:
        """Declare the weights of layer `index`."""
        super().__init__()
        self.attention = self.make_attention(config, index, names, bias)
        self.mlp = MLP(config, names)
        self.norm = LayerNorm(names.mlp_norm, config.hidden_size, config.norm_eps)
        self.block: EncoderBlock | None = None

    def make_attention(
        self,
        config: "EncoderConfig",
        index: int,
        names: LayerNames,
        bias: "PositionBias | None",
    ) -> "EncoderAttention":
        """Declare the weights of attention."""
        return EncoderAttention(config, index, names, bias)

    def fuse(self) -> None:
        """Look for a kernel of the whole layer."""
        attention, mlp = self.attention, self.mlp
        parts = BlockParts(
            qkv=attention.qkv.prepared,
            output=attention.output.prepared,
            spec=attention.spec,
            up=mlp.up.prepared,
            down=mlp.down.prepared,
            attention_norm=_facts(attention.norm),
            mlp_norm=_facts(self.norm),
        )
        self.block = make_encoder_block(parts)

    def forward(
        self, x_TC: Tensor, attention: "AttentionBatch", rotation: Rotation | None
    ) -> Tensor:
        """Return [T, C]."""
        if self.block is not None:
            done_TC = self.block(x_TC, rotation, attention)
            if done_TC is not None:
                return done_TC
        x_TC = self.attention(x_TC, attention, rotation)
        return self.norm.add(self.mlp(x_TC), x_TC)


def _facts(norm: LayerNorm) -> Norm:
    return Norm(norm.weight, norm.bias, norm.eps)


class EncoderAttention(nn.Module):
    """Self-attention over the whole sequence, with its output projection and norm."""

    def __init__(
        self,
        config: "EncoderConfig",
        index: int,
        names: LayerNames,
        bias: "PositionBias | None" = None,
    ) -> None:
        """Declare layer `index`'s projections."""
        super().__init__()
        size, inner = config.hidden_size, config.num_heads * config.head_dim
        self.spec = AttentionSpec(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            causal=False,
            bias=bias,
        )
        self.qkv = PackedLinear(names.qkv, size, [inner] * 3, bias=config.attention_bias)
        self.output = Linear(names.output, inner, size, bias=config.attention_bias)
        self.norm = LayerNorm(names.attention_norm, size, config.norm_eps)

    def project(self, x_TC: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of all heads, [T, heads * head size] each."""
        return self.qkv.split(x_TC)

    def forward(
        self, x_TC: Tensor, attention: "AttentionBatch", rotation: Rotation | None
    ) -> Tensor:
        """Return [T, C]."""
        heads = (self.spec.num_heads, self.spec.head_dim)
        q_THD, k_THD, v_THD = (part_TC.unflatten(1, heads) for part_TC in self.project(x_TC))
        if rotation is None:
            out_THD = attention.attend(q_THD, k_THD, v_THD, self.spec)
        else:
            out_THD = attend_heads(q_THD, k_THD, v_THD, rotation, None, attention, self.spec)
        return self.norm.add(self.output(out_THD.flatten(1)), x_TC)


class MLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) where there is a gate."""

    def __init__(self, config: "EncoderConfig", names: LayerNames) -> None:
        """Declare the projections."""
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.up_bias
        self.up: Projection
        if names.gate is None:
            self.up = Linear(names.up, size, inner, bias=bias, activation=config.activation)
        else:
            packed, activation = (names.gate, names.up), config.activation
            self.up = GatedLinear(*packed, size, inner, bias=bias, activation=activation)
        self.down = Linear(names.down, inner, size, bias=config.down_bias)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return [T, C]."""
        return self.down(self.up(x_TC))


class WordEmbeddings(nn.Module):
    """Words and, where there are any, segments and positions, summed and normed."""

    def __init__(self, config: "EncoderConfig", norm: str = "embeddings.LayerNorm") -> None:
        """Declare the tables that `config` speaks of, and the norm of this name."""
        super().__init__()
        size = config.hidden_size
        self.words = Embedding("embeddings.word_embeddings", config.vocab_size, size)
        self.types: Embedding | None = None
        if config.type_vocab_size:
            name = "embeddings.token_type_embeddings"
            self.types = Embedding(name, config.type_vocab_size, size)
        self.positions: Embedding | None = None
        if config.learned_positions:
            rows = config.stated_positions
            self.positions = Embedding("embeddings.position_embeddings", rows, size)
        self.norm = LayerNorm(norm, size, config.norm_eps)

    def forward(self, ids_T: Tensor, rows_T: Tensor, types_T: Tensor | None = None) -> Tensor:
        """Return [T, C].

        Args:
            ids_T: token ids.
            rows_T: each token's row of the position table.
            types_T: segment ids; None is segment 0 for every token.
        """
        if self.types is not None and self.positions is not None:
            return embed_and_norm(
                ids_T,
                rows_T,
                types_T,
                self.words.weight,
                self.positions.weight,
                self.types.weight,
                self.norm.weight,
                self.norm.bias,
                self.norm.eps,
            )
        x_TC = self.words(ids_T)
        if self.types is not None:
            x_TC = x_TC + self.types(ids_T.new_zeros(1) if types_T is None else types_T)
        if self.positions is None:
            return self.norm(x_TC)
        return self.norm.add(x_TC, self.positions(rows_T))


def rows_after_padding(ids_T: Tensor, positions_T: Tensor, pad_id: int) -> Tensor:
    """Return each token's row of a position table that leaves the pad token out (RoBERTa, MPNet).

    Tokens count up from `pad_id` + 1; a pad token, even one that the text itself holds, stands in
    row `pad_id` and is not counted.
    """
    counts_T = ids_T != pad_id
    total_T = counts_T.cumsum(0)
    index_T = positions_T.new_ones(positions_T.shape).cumsum(0) - 1
    first_T = index_T - positions_T  # each token's own sequence begins there
    before_T = (total_T - counts_T.long())[first_T]
    return (total_T - before_T) * counts_T + pad_id
