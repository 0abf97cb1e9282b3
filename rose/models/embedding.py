"""An embedder: tokens in, one vector per sequence out, or one per token.

Shape letters: T tokens, B sequences, C channels of the backbone, D channels of the vector.
"""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rose.kernels.epilogue import pool_and_finish
from rose.kernels.pooling import mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rose.models.backbone import Backbone
    from rose.models.batch import TokenBatch
    from rose.models.card import TokenOutput
    from rose.models.modules import Pooler
    from rose.models.splade import SpladePooler
    from rose.models.token_heads import TokenModules, TokenVectors, TokenWeights


class EmbeddingModel(nn.Module):
    """A backbone, pooling, and the recipe's modules.

    The trailing normalisation is not applied here but by `rose.models.output`, after the cut that
    a request may ask for. `dimensions` is the width of the vectors. A late-interaction model has
    `token_vectors` and no pooling.
    """

    def __init__(
        self,
        backbone: "Backbone",
        pooling: "Pooler | SpladePooler | None",
        modules: "Sequence[nn.Module]",
        dimensions: int,
        token_vectors: "TokenVectors | TokenModules | None" = None,
        token_weights: "TokenWeights | None" = None,
    ) -> None:
        """Join the parts; vectors are cut to `dimensions`."""
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.modules_after = nn.ModuleList(modules)
        self.dimensions = dimensions
        self.token_vectors = token_vectors
        self.token_weights = token_weights

    def forward(
        self, batch: "TokenBatch", cu_seqlens: Tensor, pool_from: Tensor | None = None
    ) -> Tensor:
        """Compute the vectors of packed sequences.

        Args:
            batch: T tokens.
            cu_seqlens: where each sequence starts, and T: integers [B + 1].
            pool_from: leading tokens of each sequence that pooling leaves out, int [B], or None.

        Returns:
            float32 [B, D], not normalised at the end.
        """
        return self.pool(self.backbone(batch), cu_seqlens, pool_from)

    def token_rows(self, x_TC: Tensor, output: "TokenOutput") -> Tensor:
        """Turn the backbone's hidden states into rows of tokens, float32 [T, ...].

        "hidden_states" are [T, C] as they are; "multi_vector" are vectors, mostly of length 1,
        [T, D], and "token_weights" [T, 1], of models that have them.
        """
        if output == "multi_vector":
            assert self.token_vectors is not None
            return self.token_vectors(x_TC)
        if output == "token_weights":
            assert self.token_weights is not None
            return self.token_weights(x_TC)
        return x_TC.float()

    def pool(self, x_TC: Tensor, cu_seqlens: Tensor, pool_from: Tensor | None = None) -> Tensor:
        """Turn the backbone's hidden states into vectors, float32 [B, D].

        Those of a late-interaction model are means, which stand for its batches' cost alone.
        """
        if self.pooling is None:
            assert self.token_vectors is not None
            return mean(self.token_vectors(x_TC), cu_seqlens, pool_from)
        if not self.modules_after and len(self.pooling.modes) == 1:
            mode, width = self.pooling.modes[0], self.dimensions
            return pool_and_finish(x_TC, cu_seqlens, pool_from, mode, width, False)
        vectors_BD = self.pooling(x_TC, cu_seqlens, pool_from)
        for module in self.modules_after:
            vectors_BD = module(vectors_BD)
        return vectors_BD[:, : self.dimensions]
