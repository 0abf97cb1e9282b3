"""The method of `rose.Engine` that gives several kinds of vectors from one pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.models.card import EmbeddingCard, EmbeddingOutput
from rose.models.output import finish
from rose.runtime.build import ServedModel
from rose.runtime.errors import RequestError
from rose.runtime.options import EmbedOptions, OutputDtype
from rose.serving.gateway.embedding_input import Prepared, options_of, prepare
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.several_outputs import checked_types, engine_outputs
from rose.serving.gateway.sparse_output import SparseRow, of_tokens, of_vocabulary, unused_ids
from rose.serving.gateway.token_vectors import of_texts
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local_inputs import Text, as_list, checked_output, plain_text
from rose.serving.local_outputs import FloatRows, run_outputs
from rose.serving.local_ranking import plainly
from rose.serving.local_rows import Progress, in_order

Rows = dict[EmbeddingOutput, FloatRows]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of some texts; what was not asked for is None.

    `dense` is [texts, dimensions] of the dtype. `sparse` are, for each text, the ids of tokens,
    int64, and their weights, float32. `multi_vector` is float32 [vectors, width] for each text.
    """

    dense: npt.NDArray[Any] | None = None
    sparse: list[SparseRow] | None = None
    multi_vector: list[FloatRows] | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """What is asked for, and what it is made of."""

    facts: EmbeddingCard
    types: tuple[EmbeddingOutput, ...]
    options: EmbedOptions
    work: Prepared

    def finish(self, rows: FloatRows) -> npt.NDArray[Any]:
        """Cut, normalise and quantise dense vectors, float32 [texts, D]."""
        return finish(rows, self.options, self.facts.normalize, self.facts.quantizer)


class TypeMethods:
    """What an engine does with a model that has several kinds of vectors, or those of tokens."""

    _served: ServedModel
    _tokenizer: Tokenizer

    def embed_types(
        self,
        texts: Text | Sequence[Text],
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
            texts: one text, or one list of token ids, or a sequence of either.
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
        body = EmbeddingRequest(
            input=[plain_text(f"input[{i}]", text) for i, text in enumerate(as_list(texts))],
            output_types=list(output_types),
            input_type=input_type,
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
            output_dtype=output_dtype,
        )
        job = self._types_job(body)
        if not job.work.ids:
            return _nothing(job)
        return self._finish_types(job, self._run_types(job, progress))

    def _types_job(self, body: EmbeddingRequest) -> _Job:
        card = self._served.card
        facts = card.embedding
        if self._served.embedding is None or facts is None:
            raise RequestError(f"model {card.name!r} cannot embed", "model")
        settings = GatewaySettings(max_inputs=max(1, len(body.input or ())))
        with plainly():
            types = checked_types(body, facts, card.name)
            options = options_of(body, facts, settings)
            if "dense" in types:
                checked_output(options, facts)
            nothing = Prepared([], 0, 0)
            work = prepare(body, card, self._tokenizer, settings) if body.input else nothing
        return _Job(facts, types, options, work)

    def _run_types(self, job: _Job, progress: Progress | None) -> Rows:
        """Run texts: their rows of each kind, one text after another."""
        assert self._served.embedding is not None
        work = job.work
        outcomes = run_outputs(
            self._served.embedding,
            work.ids,
            engine_outputs(job.types, job.facts),
            batch_tokens=self._served.max_batch_tokens,
            pool_from=work.pool_from,
            unseen_token=unseen_token(job.facts, work),
        )
        texts = in_order(outcomes, len(work.ids), progress)
        return {
            kind: np.concatenate([parts[at] for parts in texts])
            for at, kind in enumerate(job.types)
        }

    def _finish_types(self, job: _Job, rows: Rows) -> Embeddings:
        facts, work = job.facts, job.work
        dense, sparse, tokens = rows.get("dense"), rows.get("sparse"), rows.get("multi_vector")
        side = work.side or "document"
        return Embeddings(
            None if dense is None else job.finish(dense),
            None if sparse is None else self._sparse(sparse, job),
            None if tokens is None else of_texts(tokens, work.ids, facts.late, side),
        )

    def _sparse(self, rows: FloatRows, job: _Job) -> list[SparseRow]:
        if "dense" not in job.facts.outputs:
            return list(of_vocabulary(rows))
        special = self._served.card.tokenizer.special_tokens
        return list(of_tokens(job.work.ids, rows, unused_ids(self._tokenizer, special)))


def unseen_token(facts: EmbeddingCard, work: Prepared) -> int | None:
    """The token that queries are filled up with, where their others do not see it."""
    expansion = facts.late.expansion if facts.late and work.side == "query" else None
    return None if expansion is None or expansion.attend else expansion.token


def _nothing(job: _Job) -> Embeddings:
    """What is asked for, of no texts."""
    none = np.zeros((0, job.facts.dimensions), np.float32)
    return Embeddings(
        job.finish(none) if "dense" in job.types else None,
        [] if "sparse" in job.types else None,
        [] if "multi_vector" in job.types else None,
    )
