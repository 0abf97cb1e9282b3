"""The method of `rose.Engine` that embeds chunks of documents, each with its document in view."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.models.card import EmbeddingCard
from rose.models.output import finish
from rose.runtime.build import ServedModel
from rose.runtime.errors import RequestError
from rose.runtime.options import OutputDtype
from rose.serving.gateway.contextual_input import (
    Documents,
    check_pooling,
    embedding_request,
    prepare_documents,
)
from rose.serving.gateway.contextual_schemas import ContextualRequest
from rose.serving.gateway.embedding_input import options_of
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local_inputs import checked_output
from rose.serving.local_outputs import FloatRows, run_outputs
from rose.serving.local_ranking import check_texts, plainly
from rose.serving.local_rows import Progress, in_order


class ChunkMethods:
    """What an engine does with documents in chunks."""

    _served: ServedModel
    _tokenizer: Tokenizer

    def embed_chunks(
        self,
        documents: Sequence[Sequence[str]],
        *,
        input_type: str | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        output_dtype: OutputDtype = "float32",
        progress: Progress | None = None,
    ) -> list[npt.NDArray[Any]]:
        """Embed the chunks of documents: each is pooled over its own tokens in its document.

        A document goes through the model as one text ("late chunking"), so its chunks see each
        other. Models that were trained on chunks get their separator between them.

        Args:
            documents: for each document its chunks, in their order.
            input_type: "query" or "document", to choose the model's prompt.
            prompt_name: name of a prompt of the checkpoint that goes before each document.
            prompt: text that goes before each document.
            dimensions: keep the first so many numbers, then normalise; None keeps all.
            normalize: None is what the checkpoint says.
            truncate: cut the last chunk of a document that is too long instead of refusing it.
            output_dtype: "float32", "float16", "int8", "uint8", "binary" or "ubinary".
            progress: called with (documents done, documents in all).

        Returns:
            [chunks, dimensions] of the dtype, for each document.

        Raises:
            RequestError: an argument does not fit, or the model's pooling has no meaning for a
                part of a text; `field` names it.
            NonFiniteError: the model computed NaN or infinity.
        """
        facts = self._chunk_facts()
        chunks = _checked(documents)
        if not chunks:
            return []
        body = ContextualRequest(
            input=chunks,
            input_type=input_type,
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
            output_dtype=output_dtype,
        )
        settings = GatewaySettings(max_inputs=max(1, sum(map(len, chunks))))
        with plainly():
            check_pooling(facts)
            options = checked_output(options_of(embedding_request(body), facts, settings), facts)
            work = prepare_documents(body, self._served.card, self._tokenizer, settings)
        rows = self._run_chunks(work, progress)
        finished = finish(rows, options, facts.normalize, facts.quantizer)
        return np.split(finished, np.cumsum([len(spans) for spans in work.spans])[:-1])

    def _chunk_facts(self) -> EmbeddingCard:
        card = self._served.card
        facts = card.embedding
        if self._served.embedding is None or facts is None or "dense" not in facts.outputs:
            raise RequestError(f"model {card.name!r} has no vectors of texts", "model")
        return facts

    def _run_chunks(self, work: Documents, progress: Progress | None) -> FloatRows:
        """Run documents: the rows of the chunks of all of them, float32 [chunks, D]."""
        assert self._served.embedding is not None
        outcomes = run_outputs(
            self._served.embedding,
            work.ids,
            ("text",),
            batch_tokens=self._served.max_batch_tokens,
            spans=work.spans,
        )
        texts = in_order(outcomes, len(work.ids), progress)
        return np.concatenate([rows for (rows,) in texts])


def _checked(documents: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return documents as lists; a text is no list of chunks."""
    for i, document in enumerate(documents):
        if isinstance(document, str):
            place = f"input[{i}]"
            raise RequestError(f"{place}: a list of chunks is expected, not a text", place)
        check_texts([(f"input[{i}][{j}]", chunk) for j, chunk in enumerate(document)])
    return [list(document) for document in documents]
