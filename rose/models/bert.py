"""BERT (Devlin et al., 2019): a post-norm encoder with learned absolute positions.

Shape letters: T tokens of the batch, C channels.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from rose.models.encoder import Encoder, WordEmbeddings, bert_names

if TYPE_CHECKING:
    from rose.models.batch import TokenBatch
    from rose.models.encoder_config import EncoderConfig


class BertModel(Encoder):
    """The encoder; its output is the last layer's hidden states."""

    def __init__(self, config: "EncoderConfig") -> None:
        """Declare all weights of `config`."""
        super().__init__(config, bert_names)
        self.embeddings = WordEmbeddings(config)

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        x_TC = self.embeddings(batch.input_ids, batch.positions, batch.token_type_ids)
        return self.encode(x_TC, batch)
