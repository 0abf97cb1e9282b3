"""`rose.Engine`: a model in this process, without a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rose.models.card import ChatTexts, EmbeddingCard, ModelCard
from rose.models.output import finish
from rose.runtime.build import ModelOptions, build
from rose.runtime.embedding import EmbeddingRuntime
from rose.runtime.errors import RequestError
from rose.runtime.options import EmbedOptions, OutputDtype
from rose.serving.gateway.chat_texts import render_text, template_edges
from rose.serving.gateway.templates import TemplateError
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local_chunks import ChunkMethods
from rose.serving.local_completions import GenerateMethods
from rose.serving.local_inputs import Ids, Text, as_list, checked_ids, checked_output
from rose.serving.local_rows import Progress, run_rows
from rose.serving.local_scores import ScoreMethods
from rose.serving.local_types import TypeMethods


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Texts as token ids, ready to run.

    `ids` are int32 [tokens] for each text, of which the first `pool_from` are not pooled. `cut` are
    the indices of the texts that were truncated.
    """

    ids: list[Ids]
    pool_from: int
    cut: list[int]

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text) for text in self.ids)


class Engine(ChunkMethods, GenerateMethods, ScoreMethods, TypeMethods):
    """A loaded model. Use it as a context manager, or call `close`.

    Methods may be called from one thread at a time.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str | None = None,
        attention: str = "auto",
        max_model_len: int | None = None,
        max_batch_tokens: int | None = None,
        max_num_seqs: int = 32,
        kv_cache_memory: int | None = None,
        tasks: Sequence[str] = (),
        deterministic: bool = False,
        rank_by_cosine: bool = False,
    ) -> None:
        """Load a model folder.

        Args:
            model: the folder.
            device: "cpu", "cuda", or "auto": a CUDA device if there is one.
            dtype: "auto", "float32", "bfloat16" or "float16".
            quantization: "int8" or "int4" rounds the weights, on a CPU; None is what the
                checkpoint says.
            attention: name of an attention back end, or "auto".
            max_model_len: longest input in tokens; None is what the checkpoint says.
            max_batch_tokens: tokens of a batch; None measures what is best, in half a second.
            max_num_seqs: sequences that are generated at one time.
            kv_cache_memory: bytes for keys and values; None is a share of the free memory.
            tasks: "embed", "generate", "score", "classify"; none is what the checkpoint is for.
            deterministic: run each text alone, so that its vector is bit-equal in any company.
            rank_by_cosine: let an embedder score and rank too, by the cosine of its vectors.

        Raises:
            CheckpointError: the folder cannot be served; the message says why.
            ValueError: an option does not fit.
        """
        options = ModelOptions(
            path=str(model),
            device=device,
            dtype=dtype,
            quantization=quantization,
            attention=attention,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            kv_cache_memory=kv_cache_memory,
            tasks=tuple(tasks),
            deterministic=deterministic,
        )
        self._served = build(options)
        loaded = self._served.loaded
        self._tokenizer = Tokenizer.from_card(loaded.card, loaded.tokenizer_json)
        self._local_generator = None
        self._rank_by_cosine = rank_by_cosine

    @property
    def card(self) -> ModelCard:
        """What ROSE knows of the model."""
        return self._served.card

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        output_dtype: OutputDtype = "float32",
        progress: Progress | None = None,
    ) -> npt.NDArray[Any]:
        """Embed texts, or lists of token ids, which are used as they are.

        Args:
            texts: one text or a sequence of them.
            prompt_name: name of a prompt of the checkpoint that goes before each text.
            prompt: text that goes before each text; wins over `prompt_name`.
            dimensions: keep the first so many numbers, then normalise; None keeps all.
            normalize: None is what the checkpoint says.
            truncate: cut what is longer than the model allows instead of refusing it.
            output_dtype: "float32", "float16", "int8", "uint8", "binary" or "ubinary".
            progress: called with (texts done, texts in all) as batches finish.

        Returns:
            [texts, dimensions] of the dtype (binary kinds: a byte for 8 dimensions). One text
            gives one row.

        Raises:
            RequestError: an argument does not fit; `field` names it.
            NonFiniteError: the model computed NaN or infinity.
        """
        return self.embed_encoded(
            self.encode(texts, prompt_name=prompt_name, prompt=prompt, truncate=truncate),
            dimensions=dimensions,
            normalize=normalize,
            output_dtype=output_dtype,
            progress=progress,
        )

    def encode(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = False,
    ) -> EncodedTexts:
        """Do the first half of `embed`, on the CPU; arguments and errors are those of `embed`.

        One thread may encode while another is in `embed_encoded`.
        """
        _, facts = self._embedding()
        if facts.late is not None:
            message = (
                f"model {self.card.name!r} has vectors of tokens alone: embed_types gives them"
            )
            raise RequestError(message, "model")
        prefix = _choose_prompt(facts, prompt_name, prompt)
        ids = self._encode(as_list(texts), prefix, facts.chat)
        skip = 0 if facts.pools_prompt or not prefix else self._tokenizer.prompt_length(prefix)
        limit = self.card.max_model_len
        cut = [i for i, text in enumerate(ids) if len(text) > limit]
        if cut and not truncate:
            message = f"input[{cut[0]}] has {len(ids[cut[0]])} tokens, the limit is {limit}"
            raise RequestError(f"{message}; truncate=True cuts it", f"input[{cut[0]}]")
        head, tail = self._template_edges(facts.chat, prefix) if cut and facts.chat else (0, 0)
        if cut and prefix and not facts.chat:
            head = self._tokenizer.prompt_length(prefix)
        side = self.card.tokenizer.truncation_side
        fit = [self._tokenizer.cut(i, limit, side, head, tail) for i in ids]
        return EncodedTexts(fit, skip, cut)

    def embed_encoded(
        self,
        encoded: EncodedTexts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        output_dtype: OutputDtype = "float32",
        progress: Progress | None = None,
    ) -> npt.NDArray[Any]:
        """Do the second half of `embed`: arguments, result and errors are those of `embed`.

        Texts run longest first.
        """
        runtime, facts = self._embedding()
        options = _check_options(facts, dimensions, normalize, output_dtype)
        if not encoded.ids:
            return _finish(np.zeros((1, facts.dimensions), np.float32), options, facts)[:0]
        if encoded.pool_from >= min(map(len, encoded.ids)):
            raise RequestError("the prompt leaves no token to pool", "prompt")
        rows = run_rows(
            runtime,
            encoded.ids,
            width=facts.dimensions,
            batch_tokens=self._served.max_batch_tokens,
            skip=encoded.pool_from,
            progress=progress,
        )
        return _finish(rows, options, facts)

    def close(self) -> None:
        """Free the model."""
        self._served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _embedding(self) -> tuple[EmbeddingRuntime, EmbeddingCard]:
        if self._served.embedding is None or self.card.embedding is None:
            raise RequestError(f"model {self.card.name!r} cannot embed", "model")
        return self._served.embedding, self.card.embedding

    def _encode_chat(self, texts: Sequence[str], prompt: str, chat: ChatTexts) -> list[Ids]:
        """Return the ids of texts that pass through the chat template."""
        try:
            rendered = [render_text(self.card.tokenizer, chat, text, prompt) for text in texts]
        except TemplateError as error:
            raise RequestError(f"input: {error}", "input") from error
        return self._tokenizer.encode(rendered, add_special_tokens=False)

    def _template_edges(self, chat: ChatTexts, prompt: str) -> tuple[int, int]:
        """Return how many tokens the chat template puts before and behind a text."""
        card = self.card.tokenizer
        return template_edges(self._tokenizer, lambda t: render_text(card, chat, t, prompt))

    def _encode(self, items: Sequence[Text], prefix: str, chat: ChatTexts | None) -> list[Ids]:
        """Return the ids of each item, checked but for their number."""
        strings = [i for i, item in enumerate(items) if isinstance(item, str)]
        texts = [str(items[i]) for i in strings]
        if chat is None:
            encoded = self._tokenizer.encode([f"{prefix}{text}" for text in texts])
        else:
            encoded = self._encode_chat(texts, prefix, chat)
        found = dict(zip(strings, encoded, strict=True))
        # Texts too: a tokenizer can know tokens that the model has no row for.
        vocab_size = self.card.vocab_size
        out = [
            checked_ids(f"input[{i}]", found.get(i, item), vocab_size)
            for i, item in enumerate(items)
        ]
        if empty := [i for i, ids in enumerate(out) if not len(ids)]:
            raise RequestError(f"input[{empty[0]}] has no tokens", f"input[{empty[0]}]")
        return out


def _check_options(
    facts: EmbeddingCard, dimensions: int | None, normalize: bool | None, output_dtype: OutputDtype
) -> EmbedOptions:
    options = EmbedOptions(dimensions=dimensions, normalize=normalize, output_dtype=output_dtype)
    return checked_output(options, facts)


def _finish(
    rows: npt.NDArray[np.float32], options: EmbedOptions, facts: EmbeddingCard
) -> npt.NDArray[Any]:
    return finish(rows, options, facts.normalize, facts.quantizer)


def _choose_prompt(facts: EmbeddingCard, name: str | None, text: str | None) -> str:
    if text is not None:
        return text
    name = name if name is not None else facts.default_prompt_name
    if name is None:
        return ""
    if name not in facts.prompts:
        known = ", ".join(sorted(facts.prompts)) or "none"
        raise RequestError(f"unknown prompt {name!r}; the model has: {known}", "prompt_name")
    return facts.prompts[name]
