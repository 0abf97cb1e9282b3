"""The method of `rose.Engine` that gives several kinds of vectors from one pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.models.card import EmbeddingCard, RowOutput
from rose.models.output import finish
from rose.runtime.build import ServedModel
from rose.runtime.errors import RequestError
from rose.runtime.options import OutputDtype
from rose.serving.gateway.embedding_input import Prepared, options_of, prepare
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.several_outputs import checked_types, engine_outputs
from rose.serving.gateway.sparse_output import SparseRow, of_tokens, of_vocabulary, unused_ids
from rose.serving.gateway.token_vectors import of_texts
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local_outputs import FloatRows, Ids, run_outputs
from rose.serving.local_ranking import plainly
from rose.serving.local_rows import Progress


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of some texts; what was not asked for is None.

    `dense` is [texts, dimensions] of the dtype. `sparse` are, for each text, the ids of tokens,
    int64, and their weights, float32. `multi_vector` is float32 [vectors, width] for each text.
    """

    dense: npt.NDArray[Any] | None = None
    sparse: list[SparseRow] | None = None
    multi_vector: list[FloatRows] | None = None


class TypeMethods:
    """What an engine does with a model that has several kinds of vectors, or those of tokens."""

    _served: ServedModel
    _tokenizer: Tokenizer

    def embed_types(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]],
        output_types: Sequence[str],
        *,
        input_type: str | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        output_dtype: OutputDtype = "float32",
        progress: Progress | None = None,
    ) -> Embeddings:
        """Embed texts, or lists of token ids, in several ways at once.

        Args:
            texts: one text or a sequence of them, or of lists of token ids.
            output_types: "dense", "sparse", "multi_vector": those of `card.embedding.outputs`.
            input_type: "query" or "document"; a late-interaction model needs to know.
            prompt_name: name of a prompt of the checkpoint that goes before each text.
            prompt: text that goes before each text.
            dimensions: keep the first so many numbers of dense vectors, then normalise.
            normalize: whether dense vectors have length 1; None is what the checkpoint says.
            truncate: cut what is longer than the model allows instead of refusing it.
            output_dtype: type of the dense vectors; see `embed`.
            progress: called with (texts done, texts in all).

        Returns:
            What was asked for.

        Raises:
            RequestError: an argument does not fit; `field` names it.
            NonFiniteError: the model computed NaN or infinity.
        """
        card = self._served.card
        facts = card.embedding
        if self._served.embedding is None or facts is None:
            raise RequestError(f"model {card.name!r} cannot embed", "model")
        body = EmbeddingRequest(
            input=[texts] if isinstance(texts, str) else [_plain(text) for text in texts],
            output_types=list(output_types),
            input_type=input_type,
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
            output_dtype=output_dtype,
        )
        settings = GatewaySettings(max_inputs=max(1, len(texts)))
        with plainly():
            types = checked_types(body, facts, card.name)
            options = options_of(body, facts, settings)
            work = prepare(body, card, self._tokenizer, settings)
        outputs = engine_outputs(types, facts)
        found: dict[int, list[FloatRows]] = {}
        for index, parts in self._run(work, outputs, facts):
            found[index] = parts
            if progress:
                progress(len(found), len(work.ids))
        rows = {kind: [found[i][at] for i in range(len(work.ids))] for at, kind in enumerate(types)}
        dense = rows.get("dense")
        return Embeddings(
            None
            if dense is None
            else finish(np.concatenate(dense), options, facts.normalize, facts.quantizer),
            self._sparse(rows["sparse"], work.ids, facts) if "sparse" in rows else None,
            _tokens(rows["multi_vector"], work, facts) if "multi_vector" in rows else None,
        )

    def _run(
        self, work: Prepared, outputs: tuple[RowOutput, ...], facts: EmbeddingCard
    ) -> Iterator[tuple[int, list[FloatRows]]]:
        assert self._served.embedding is not None
        return run_outputs(
            self._served.embedding,
            work.ids,
            outputs,
            batch_tokens=self._served.max_batch_tokens,
            pool_from=work.pool_from,
            unseen_token=unseen_token(facts, work),
        )

    def _sparse(
        self, rows: list[FloatRows], ids: list[Ids], facts: EmbeddingCard
    ) -> list[SparseRow]:
        whole = np.concatenate(rows)
        if "dense" not in facts.outputs:
            return list(of_vocabulary(whole))
        special = self._served.card.tokenizer.special_tokens
        return list(of_tokens(ids, whole, unused_ids(self._tokenizer, special)))


def unseen_token(facts: EmbeddingCard, work: Prepared) -> int | None:
    """The token that queries are filled up with, where their others do not see it."""
    expansion = facts.late.expansion if facts.late and work.side == "query" else None
    return None if expansion is None or expansion.attend else expansion.token


def _tokens(rows: list[FloatRows], work: Prepared, facts: EmbeddingCard) -> list[FloatRows]:
    return of_texts(np.concatenate(rows), work.ids, facts.late, work.side or "document")


def _plain(text: str | Sequence[int]) -> Any:  # noqa: ANN401 - as requests have it
    return text if isinstance(text, str) else [int(token) for token in text]
