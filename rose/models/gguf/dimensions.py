"""The sizes of the model in a GGUF file."""

from dataclasses import dataclass

from rose.models.gguf.families import FAMILIES
from rose.models.gguf.reader import GgufFile


@dataclass(frozen=True)
class Dimensions:
    """Sizes of the model."""

    layers: int
    vocabulary: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int = 0
    token_types: int = 0
    experts: int = 0
    expert_feed_forward: int = 0

    def size(self, letter: str) -> int:
        """The size that a shape letter (see `rose.models.gguf.families`) stands for."""
        return {
            "V": self.vocabulary,
            "H": self.hidden,
            "F": self.feed_forward,
            "G": 2 * self.feed_forward,
            "Q": self.heads * self.head_dim,
            "K": self.kv_heads * self.head_dim,
            "A": (self.heads + 2 * self.kv_heads) * self.head_dim,
            "D": self.head_dim,
            "E": self.experts,
            "X": self.expert_feed_forward,
            "P": self.positions,
            "T": self.token_types,
        }[letter]


def read_dimensions(gguf: GgufFile) -> Dimensions:
    """The sizes of the model from the metadata, and of the vocabulary from the embedding."""
    heads = gguf.require(gguf.own("attention.head_count"), int)
    hidden = gguf.require(gguf.own("embedding_length"), int)
    head_dim = gguf.get(gguf.own("attention.key_length"), int, hidden // max(heads, 1))
    whole = ["attention.value_length", "rope.dimension_count"]
    if gguf.architecture == "phi3":  # there a share of the channels may rotate
        whole.remove("rope.dimension_count")
    for name in whole:
        if (size := gguf.get(gguf.own(name), int, head_dim)) != head_dim:
            raise gguf.error(f"setting {name!r} is {size}, but heads are {head_dim} wide")
    if "token_embd.weight" not in gguf.tensors:
        raise gguf.error("has no tensor 'token_embd.weight': it holds no language model")
    tables = {
        name: gguf.shape(f"{source}.weight")[0] if f"{source}.weight" in gguf.tensors else 0
        for name, source in (("positions", "position_embd"), ("token_types", "token_types"))
    }
    is_mixture = "expert_count" in FAMILIES[gguf.architecture].settings
    return Dimensions(
        layers=gguf.require(gguf.own("block_count"), int),
        vocabulary=gguf.shape("token_embd.weight")[0],
        hidden=hidden,
        feed_forward=gguf.require(gguf.own("feed_forward_length"), int),
        heads=heads,
        kv_heads=gguf.get(gguf.own("attention.head_count_kv"), int, heads),
        head_dim=head_dim,
        experts=gguf.require(gguf.own("expert_count"), int) if is_mixture else 0,
        expert_feed_forward=(
            gguf.require(gguf.own("expert_feed_forward_length"), int) if is_mixture else 0
        ),
        **tables,
    )
