"""Gives the runtimes of a model on a GPU their graph caches."""

import logging
from typing import TYPE_CHECKING

from rose.runtime.graphs import (
    MAX_SEQUENCES,
    Capturer,
    GraphPolicy,
    decode_key,
    measure_inflection,
)

if TYPE_CHECKING:
    from rose.models.card import ModelCard
    from rose.runtime.decode import DecodeRuntime
    from rose.runtime.embedding import EmbeddingRuntime

log = logging.getLogger(__name__)


def embed_with_graphs(
    runtime: "EmbeddingRuntime", card: "ModelCard", capturer: Capturer, max_tokens: int | None
) -> None:
    """Run small batches of texts as graphs, if the attention back end can be captured.

    Args:
        runtime: has no graphs yet.
        card: its model's.
        capturer: makes the graphs.
        max_tokens: tokens from which batches run eagerly; None measures it.
    """
    if not runtime.can_use_graphs:
        log.info("no device graphs for batches of texts")
        return
    if max_tokens is None:
        max_tokens = measure_inflection(
            lambda tokens: runtime.time_batch(tokens, card.max_model_len, card.vocab_size)
        )
    log.info("batches of up to %d tokens run as device graphs", max_tokens)
    runtime.use_graphs(capturer, GraphPolicy(max_tokens=max_tokens))


def decode_with_graphs(
    runtime: "DecodeRuntime", capturer: Capturer, max_num_seqs: int, max_len: int
) -> None:
    """Run decode steps as graphs, if the attention back end can be captured.

    Such a step waits for memory and not for arithmetic, so there is no point from which the
    launches are hidden.
    """
    if not runtime.can_use_graphs:
        log.info("no device graphs for decode steps")
        return
    most = max(MAX_SEQUENCES, decode_key(max_num_seqs).sequences)
    policy = GraphPolicy(max_tokens=max_num_seqs, max_sequences=most)
    runtime.use_graphs(capturer, policy, max_len)
