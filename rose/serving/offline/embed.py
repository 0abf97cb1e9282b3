"""`rose embed`: a file of texts in, a file of vectors out, in chunks that are saved as they finish.

Reading and tokenising the next chunk goes on while the model runs the present one. On one machine
the same command gives the same bytes, whether it ran through or was stopped and went on: chunks and
batches are cut by the texts alone. (The number of threads, for one, changes the last bits.)
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rose.models.plan import Plan, plan_checkpoint
from rose.runtime.errors import NonFiniteError, RequestError
from rose.runtime.options import OutputDtype
from rose.serving.offline.chunks import Chunk, cut_chunks
from rose.serving.offline.errors import InputError, OutputError
from rose.serving.offline.job import check_output, choose_device, digest_model, resumable
from rose.serving.offline.outputs import Output, WriteChunk, output_for
from rose.serving.offline.partial import DoneChunk, Partial, open_partial
from rose.serving.offline.progress import Display, Meter
from rose.serving.offline.sources import Source, open_source
from rose.serving.offline.wording import counted

if TYPE_CHECKING:
    from rose.serving.local import EncodedTexts, Engine

CHUNK_ROWS = 2048
CHUNK_CHARS = 1 << 20
# Fixed and not measured, so that the same command gives the same bytes: above a model's saturation
# point a larger batch changes the throughput little.
BATCH_TOKENS_CPU = 2048
BATCH_TOKENS_GPU = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedFile:
    """What to embed and how; the fields are the options of `rose embed`."""

    model: str
    input: str
    output: Path
    column: str | None = None
    keep: tuple[str, ...] = ()
    prompt_name: str | None = None
    prompt: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    output_dtype: OutputDtype = "float32"
    truncate: bool = False
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    attention: str = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    deterministic: bool = False
    chunk_size: int = CHUNK_ROWS
    force: bool = False
    restart: bool = False

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch; `device` is no longer "auto"."""
        default = BATCH_TOKENS_CPU if self.device == "cpu" else BATCH_TOKENS_GPU
        return self.max_batch_tokens or default


# The options that the numbers depend on. `truncate` is not among them: see `_check_truncation`.
_FACTS = (
    "keep",
    "prompt_name",
    "prompt",
    "dimensions",
    "normalize",
    "output_dtype",
    "device",
    "dtype",
    "quantization",
    "attention",
    "max_model_len",
    "max_batch_tokens",
    "deterministic",
    "chunk_size",
)


@dataclass(frozen=True, slots=True)
class Summary:
    """What was written: texts, their tokens, how many of them were cut to `limit` tokens."""

    texts: int
    tokens: int
    cut: int
    limit: int


def embed_file(job: EmbedFile, display: Display) -> Summary:
    """Embed a file; goes on where an earlier run of the same job stopped.

    Raises:
        InputError: the input cannot be read, or a text cannot be served; names file and line.
        OutputError: the output cannot be written, or an earlier run did something else.
        CheckpointError: the model cannot be served.
        RequestError: an option does not fit the model.
        StoppedError: Ctrl-C; says how to go on.
    """
    check_output(job.output, force=job.force)
    output = output_for(job.output, job.keep)
    source = open_source(job.input, column=job.column, keep=job.keep)
    plan = plan_checkpoint(job.model, max_model_len=job.max_model_len, tasks=("embed",))
    job = replace(job, device=choose_device(job.device))
    with open_partial(job.output) as partial, resumable(partial):
        if job.restart:
            partial.clear()
        partial.resume(_facts(job, source, plan))
        _check_truncation(job, partial)
        _Run(job, source, output, partial, display).run()
        done = partial.chunks
        return Summary(
            texts=partial.rows,
            tokens=sum(chunk.tokens for chunk in done),
            cut=sum(chunk.cut for chunk in done),
            limit=plan.max_model_len,
        )


def _facts(job: EmbedFile, source: Source, plan: Plan) -> dict[str, Any]:
    """List what the numbers depend on, by the names that users know."""
    options = {f"--{name.replace('_', '-')}": getattr(job, name) for name in _FACTS}
    options["--max-batch-tokens"] = job.batch_tokens
    return {"MODEL": digest_model(plan), "--column": source.column, **options}


def _check_truncation(job: EmbedFile, partial: Partial) -> None:
    """Without --truncate no text may have been cut; with it, none has to be."""
    cut = sum(chunk.cut for chunk in partial.chunks)
    if cut and not job.truncate:
        raise OutputError(
            f"{partial.folder} was begun with --truncate and "
            f"{counted(cut, 'text was', 'texts were')} cut. "
            "Give it again to go on, or --restart to begin afresh."
        )


class _Ready(NamedTuple):
    """A chunk that can run."""

    chunk: Chunk
    write: WriteChunk
    encoded: "EncodedTexts"


class _Run:
    """One run of a job."""

    def __init__(
        self, job: EmbedFile, source: Source, output: Output, partial: Partial, display: Display
    ) -> None:
        self._job, self._source, self._output = job, source, output
        self._partial, self._display = partial, display
        self._meter = Meter(source.total)

    def run(self) -> None:
        """Check what is done, do the rest, and put the output together."""
        chunks = cut_chunks(self._source.rows, self._job.chunk_size, CHUNK_CHARS)
        for done in self._partial.chunks:
            self._check_same(next(chunks, None), done)
        first = next(chunks, None)
        if first is not None:
            self._embed_all(itertools.chain([first], chunks))
        elif not self._partial.chunks:
            raise InputError(f"{self._source.label} holds no texts")
        self._partial.finish(self._output.join)

    def _check_same(self, chunk: Chunk | None, done: DoneChunk) -> None:
        """Refuse an input whose embedded part is not what it was."""
        if chunk is None or chunk.digest() != done.digest:
            place = "its end" if chunk is None else self._span(chunk)
            raise InputError(
                f"{self._source.label} differs at {place} from what {self._partial.folder} was "
                "begun with. --restart begins afresh."
            )
        self._output.prepare(chunk)
        self._meter.texts_before += done.rows
        self._meter.done_before = self._meter.done = chunk.rows[-1].done

    def _span(self, chunk: Chunk) -> str:
        return f"{self._source.unit}s {chunk.rows[0].place} to {chunk.rows[-1].place}"

    def _embed_all(self, chunks: Iterator[Chunk]) -> None:
        with self._engine() as engine, ThreadPoolExecutor(1) as reader:
            self._meter = Meter(
                self._meter.total, self._meter.texts_before, self._meter.done_before
            )
            ready = reader.submit(self._prepare, engine, chunks)
            while (item := ready.result()) is not None:
                ready = reader.submit(self._prepare, engine, chunks)
                self._embed(engine, item)

    def _engine(self) -> "Engine":
        from rose.serving.local import Engine

        job = self._job
        return Engine(
            job.model,
            device=job.device,
            dtype=job.dtype,
            quantization=job.quantization,
            attention=job.attention,
            max_model_len=job.max_model_len,
            max_batch_tokens=job.batch_tokens,
            deterministic=job.deterministic,
            tasks=("embed",),
        )

    def _prepare(self, engine: "Engine", chunks: Iterator[Chunk]) -> _Ready | None:
        """Read and tokenise the next chunk; None at the end. Runs on the reader's thread."""
        chunk = next(chunks, None)
        if chunk is None:
            return None
        write = self._output.prepare(chunk)
        with self._placed(chunk):
            encoded = engine.encode(
                chunk.texts,
                prompt_name=self._job.prompt_name,
                prompt=self._job.prompt,
                truncate=self._job.truncate,
            )
        return _Ready(chunk, write, encoded)

    def _embed(self, engine: "Engine", ready: _Ready) -> None:
        job, chunk, encoded = self._job, ready.chunk, ready.encoded
        with self._placed(chunk):
            vectors = engine.embed_encoded(
                encoded,
                dimensions=job.dimensions,
                normalize=job.normalize,
                output_dtype=job.output_dtype,
                progress=self._progress(ready),
            )
        done = DoneChunk(len(chunk.rows), encoded.tokens, len(encoded.cut), chunk.digest())
        self._partial.add(done, lambda file: ready.write(file, vectors))

    def _progress(self, ready: _Ready) -> Callable[[int, int], None]:
        """Return a callback for the texts done of a chunk, which run longest first."""
        meter = self._meter
        texts, tokens, done = meter.texts, meter.tokens, meter.done or meter.done_before
        lengths = np.array([len(ids) for ids in ready.encoded.ids])
        sums = np.cumsum(-np.sort(-lengths))

        def advance(finished: int, _total: int) -> None:
            part = int(sums[finished - 1])
            meter.texts = texts + finished
            meter.tokens = tokens + part
            meter.done = done + (ready.chunk.rows[-1].done - done) * part / int(sums[-1])
            self._display(meter)

        return advance

    @contextlib.contextmanager
    def _placed(self, chunk: Chunk) -> Iterator[None]:
        """Name file and line where an error is about a text."""
        try:
            yield
        except (RequestError, NonFiniteError) as error:
            found = re.fullmatch(r"input\[(\d+)\]", error.field or "")
            if found is None:
                raise
            where = self._source.where(chunk.rows[int(found[1])].place)
            message = (
                str(error).replace(found[0], "the text").replace("truncate=True", "--truncate")
            )
            raise InputError(f"{where}: {message}") from error
