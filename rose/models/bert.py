"""BERT (Devlin et al., 2019): a post-norm encoder with learned absolute positions.

Shape letters: T tokens of the batch, C channels, I intermediate size, H heads, D head size.
"""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rose.kernels.activation import activate
from rose.kernels.attention.base import AttentionSpec
from rose.models.layers import Embedding, LayerNorm, Linear, PackedLinear, known_activation

if TYPE_CHECKING:
    from rose.kernels.attention.base import AttentionBatch
    from rose.models.batch import TokenBatch
    from rose.models.bert_config import BertConfig


class BertModel(nn.Module):
    """The encoder; its output is the last layer's hidden states."""

    def __init__(self, config: "BertConfig") -> None:
        """Declare all weights of `config`."""
        super().__init__()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.embeddings = BertEmbeddings(config)
        layers = [BertLayer(config, index) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.attention_specs = [layer.attention.spec for layer in layers]

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        x_TC = self.embeddings(batch.input_ids, batch.positions, batch.token_type_ids)
        for layer in self.layers:
            x_TC = layer(x_TC, batch.attention)
        return x_TC


class BertEmbeddings(nn.Module):
    """Sum of word, position and segment embeddings, normed."""

    def __init__(self, config: "BertConfig") -> None:
        """Declare the three tables and the norm."""
        super().__init__()
        size = config.hidden_size
        self.words = Embedding("embeddings.word_embeddings", config.vocab_size, size)
        self.positions = Embedding("embeddings.position_embeddings", config.max_positions, size)
        self.types = Embedding("embeddings.token_type_embeddings", config.type_vocab_size, size)
        self.norm = LayerNorm("embeddings.LayerNorm", size, config.norm_eps)

    def forward(self, ids_T: Tensor, positions_T: Tensor, types_T: Tensor | None) -> Tensor:
        """Return [T, C]; without segment ids every token is of segment 0."""
        types_TC = self.types.weight[:1] if types_T is None else self.types(types_T)
        return self.norm.add(self.words(ids_T) + types_TC, self.positions(positions_T))


class BertAttention(nn.Module):
    """Self-attention over the whole sequence, with its output projection and norm."""

    def __init__(self, config: "BertConfig", index: int) -> None:
        """Declare layer `index`'s projections."""
        super().__init__()
        name = f"encoder.layer.{index}.attention"
        size = config.hidden_size
        self.spec = AttentionSpec(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            causal=False,
        )
        packed = [f"{name}.self.{part}" for part in ("query", "key", "value")]
        self.qkv = PackedLinear(packed, size, [size] * 3, bias=True)
        self.output = Linear(f"{name}.output.dense", size, size, bias=True)
        self.norm = LayerNorm(f"{name}.output.LayerNorm", size, config.norm_eps)

    def forward(self, x_TC: Tensor, attention: "AttentionBatch") -> Tensor:
        """Return [T, C]."""
        heads = (self.spec.num_heads, self.spec.head_dim)
        q_THD, k_THD, v_THD = (part_TC.unflatten(1, heads) for part_TC in self.qkv.split(x_TC))
        out_THD = attention.attend(q_THD, k_THD, v_THD, self.spec)
        return self.norm.add(self.output(out_THD.flatten(1)), x_TC)


class BertLayer(nn.Module):
    """Attention, then a two-layer perceptron, each followed by the norm of the sum."""

    def __init__(self, config: "BertConfig", index: int) -> None:
        """Declare the weights of layer `index`."""
        super().__init__()
        name = f"encoder.layer.{index}"
        size, inner = config.hidden_size, config.intermediate_size
        self.activation = known_activation(config.activation)
        self.attention = BertAttention(config, index)
        self.up = Linear(f"{name}.intermediate.dense", size, inner, bias=True)
        self.down = Linear(f"{name}.output.dense", inner, size, bias=True)
        self.norm = LayerNorm(f"{name}.output.LayerNorm", size, config.norm_eps)

    def forward(self, x_TC: Tensor, attention: "AttentionBatch") -> Tensor:
        """Return [T, C]."""
        x_TC = self.attention(x_TC, attention)
        inner_TI = activate(self.up(x_TC), self.activation)
        return self.norm.add(self.down(inner_TI), x_TC)
