"""RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020): BERT with other positions.

Shape letters: T tokens of the batch, C channels.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from rose.models.encoder import Encoder, WordEmbeddings, bert_names, rows_after_padding

if TYPE_CHECKING:
    from rose.models.batch import TokenBatch
    from rose.models.encoder_config import EncoderConfig


class RobertaModel(Encoder):
    """The encoder; its output is the last layer's hidden states."""

    def __init__(self, config: "EncoderConfig") -> None:
        """Declare all weights of `config`."""
        super().__init__(config, bert_names)
        self.embeddings = WordEmbeddings(config)
        self.pad_id = config.stated_positions - config.max_positions - 1

    def forward(self, batch: "TokenBatch") -> Tensor:
        """Return hidden states [T, C]."""
        rows_T = rows_after_padding(batch.input_ids, batch.positions, self.pad_id)
        return self.encode(self.embeddings(batch.input_ids, rows_T, batch.token_type_ids), batch)
