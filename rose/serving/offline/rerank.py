"""`rose rerank`: documents ranked by a query, or row by row by the query of each row.

With one query every row of the input is a document, and the output lists them from the best on;
they are held in memory. Without, a row has a query and a list of documents, and row i of the output
ranks those of row i. Scores are saved in chunks as they are computed, so a job that was stopped
goes on where it was.
"""

import contextlib
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from rose.models.errors import CheckpointError
from rose.models.plan import Plan, plan_checkpoint
from rose.runtime.errors import NonFiniteError, RequestError
from rose.serving.offline.chunks import Chunk, cut_chunks
from rose.serving.offline.errors import InputError, OutputError
from rose.serving.offline.job import check_output, choose_device, digest_model, resumable
from rose.serving.offline.outputs import json_fields
from rose.serving.offline.partial import DoneChunk, Partial, open_partial
from rose.serving.offline.progress import Display, Meter
from rose.serving.offline.sources import Row, Source, open_source

if TYPE_CHECKING:
    from rose.serving.local import Engine
    from rose.serving.local_ranking import Encoded, PairOptions

QUERY, DOCUMENTS = "query", "documents"
CHUNK_DOCUMENTS, CHUNK_CHARS = 2048, 1 << 20
CHUNK_QUERIES = 16
# Fixed and not measured, so that the same command gives the same numbers.
BATCH_TOKENS_CPU, BATCH_TOKENS_GPU = 2048, 16384
RESULTS = "results"
_OWN = ("rank", "index", "score", "text", RESULTS)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankFile:
    """What to rank and how; the fields are the options of `rose rerank`."""

    model: str
    input: str
    output: Path
    query: str | None = None
    column: str | None = None
    keep: tuple[str, ...] = ()
    top_n: int | None = None
    texts: bool = False
    instruction: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    truncate: bool = False
    max_tokens_per_doc: int | None = None
    raw_scores: bool = False
    rank_by_cosine: bool = False
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    attention: str = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    deterministic: bool = False
    force: bool = False
    restart: bool = False


# The options that the output depends on.
_FACTS = (
    *("query", "keep", "top_n", "texts", "instruction", "prompt_name", "prompt", "truncate"),
    *(
        "max_tokens_per_doc",
        "raw_scores",
        "rank_by_cosine",
        "device",
        "dtype",
        "quantization",
        "attention",
    ),
    *("max_model_len", "max_batch_tokens", "deterministic"),
)


@dataclass(frozen=True, slots=True)
class Summary:
    """What was ranked: queries, their documents, and the tokens of all pairs."""

    queries: int
    documents: int
    tokens: int
    truncated: int


def rerank_file(job: RerankFile, display: Display) -> Summary:
    """Rank the documents of a file; goes on where an earlier run of the same job stopped.

    Raises:
        InputError: the input cannot be read, or a row cannot be served; names file and line.
        OutputError: the output cannot be written, or an earlier run did something else.
        CheckpointError: the model cannot be served, or does not rank.
        RequestError: an option does not fit the model.
        StoppedError: Ctrl-C; says how to go on.
    """
    check_output(job.output, force=job.force)
    _check_columns(job)
    source = _open(job)
    plan = _plan(job)
    job = replace(job, device=choose_device(job.device))
    with open_partial(job.output) as partial, resumable(partial):
        if job.restart:
            partial.clear()
        partial.resume(_facts(job, source, plan))
        return _Run(job, source, partial, display).run()


def _plan(job: RerankFile) -> Plan:
    try:
        return plan_checkpoint(job.model, max_model_len=job.max_model_len, tasks=(_task(job),))
    except CheckpointError as error:
        if not job.rank_by_cosine and _embeds(job.model):
            message = f"{error}; --rank-by-cosine ranks by the vectors of an embedder"
            raise CheckpointError(message) from error
        raise


def _task(job: RerankFile) -> str:
    """What the model is loaded for: to embed where it is to rank so and no ranker."""
    by_vectors = job.rank_by_cosine and "score" not in plan_checkpoint(job.model).tasks
    return "embed" if by_vectors else "score"


def _embeds(model: str) -> bool:
    with contextlib.suppress(CheckpointError):
        return "embed" in plan_checkpoint(model).tasks
    return False


def _check_columns(job: RerankFile) -> None:
    if job.output.suffix.lower() != ".jsonl":
        raise OutputError(f"{job.output}: the output's name must end in .jsonl")
    if taken := [name for name in job.keep if name in _OWN]:
        raise OutputError(f"--keep: the output has a column {taken[0]!r} of its own")


def _open(job: RerankFile) -> Source:
    if job.query is not None:
        return open_source(job.input, column=job.column, keep=job.keep)
    if not job.input.endswith((".jsonl", ".parquet")):
        raise InputError(
            f"{job.input}: without --query a row has a query and a list of documents, which a "
            ".jsonl or .parquet file can hold"
        )
    keep = (DOCUMENTS, *(name for name in job.keep if name != DOCUMENTS))
    return open_source(job.input, column=job.column or QUERY, keep=keep)


def _facts(job: RerankFile, source: Source, plan: Plan) -> dict[str, Any]:
    """List what the output depends on, by the names that users know."""
    options = {f"--{name.replace('_', '-')}": getattr(job, name) for name in _FACTS}
    options["--max-batch-tokens"] = _batch_tokens(job)
    return {"MODEL": digest_model(plan), "--column": source.column, **options}


def _batch_tokens(job: RerankFile) -> int:
    return job.max_batch_tokens or (BATCH_TOKENS_CPU if job.device == "cpu" else BATCH_TOKENS_GPU)


class _Run:
    """One run of a job."""

    def __init__(self, job: RerankFile, source: Source, partial: Partial, display: Display) -> None:
        self._job, self._source, self._partial, self._display = job, source, partial, display
        self._meter = Meter(source.total)
        self._one_query = job.query is not None
        self._kept: list[tuple[str, bytes]] = []  # texts and columns of the documents of one query
        self._raw: list[Floats] = []

    def run(self) -> Summary:
        """Check what is done, do the rest, and put the output together."""
        rows = CHUNK_DOCUMENTS if self._one_query else CHUNK_QUERIES
        chunks = cut_chunks(self._source.rows, rows, CHUNK_CHARS)
        for number, done in enumerate(self._partial.chunks):
            self._check_same(next(chunks, None), done, number)
        first = next(chunks, None)
        if first is not None:
            self._rank_all(itertools.chain([first], chunks))
        elif not self._partial.chunks:
            raise InputError(f"{self._source.label} holds nothing to rank")
        summary = self._summary()
        self._partial.finish(self._join)
        return summary

    def _summary(self) -> Summary:
        done = self._partial.chunks
        queries = 1 if self._one_query else self._partial.rows
        tokens, truncated = sum(c.tokens for c in done), sum(c.cut for c in done)
        return Summary(queries, self._meter.texts_before + self._meter.texts, tokens, truncated)

    def _check_same(self, chunk: Chunk | None, done: DoneChunk, number: int) -> None:
        """Refuse an input whose ranked part is not what it was."""
        if chunk is None or chunk.digest() != done.digest:
            place = "its end" if chunk is None else f"{self._source.unit} {chunk.rows[0].place} on"
            raise InputError(
                f"{self._source.label} differs at {place} from what {self._partial.folder} was "
                "begun with. --restart begins afresh."
            )
        documents = [self._documents(row, values) for row, values in _rows(chunk)]
        self._meter.texts_before += sum(map(len, documents))
        self._meter.done_before = self._meter.done = chunk.rows[-1].done
        if self._one_query:
            self._keep(chunk)
            self._raw.append(np.load(io.BytesIO(self._partial.paths[number].read_bytes())))

    def _keep(self, chunk: Chunk) -> None:
        for row, values in _rows(chunk):
            self._kept.append((row.text, json_fields(values)))

    def _rank_all(self, chunks: Iterator[Chunk]) -> None:
        with self._engine() as engine:
            self._meter = Meter(
                self._meter.total, self._meter.texts_before, self._meter.done_before
            )
            for chunk in chunks:
                self._rank(engine, chunk)
                self._meter.done = chunk.rows[-1].done
                self._display(self._meter)

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
            max_batch_tokens=_batch_tokens(job),
            deterministic=job.deterministic,
            tasks=(_task(job),),
            rank_by_cosine=job.rank_by_cosine,
        )

    def _options(self) -> "PairOptions":
        from rose.serving.local_ranking import PairOptions

        job = self._job
        return PairOptions(
            instruction=job.instruction,
            prompt_name=job.prompt_name,
            prompt=job.prompt,
            truncate=job.truncate,
            max_tokens_per_doc=job.max_tokens_per_doc,
        )

    def _rank(self, engine: "Engine", chunk: Chunk) -> None:
        """Score a chunk and save what came of it."""
        encoded, documents = self._encode(engine, chunk)
        with self._placed(chunk.rows):
            raw = engine.ranker().raw(encoded)[:, 0]
        self._meter.texts += len(raw)
        self._meter.tokens += encoded.tokens
        done = DoneChunk(len(chunk.rows), encoded.tokens, encoded.truncated, chunk.digest())
        if self._one_query:
            self._keep(chunk)
            self._raw.append(raw)
            self._partial.add(done, lambda file: np.save(file, raw))
            return
        lines = b"".join(self._lines(engine, chunk, documents, raw))
        self._partial.add(done, lambda file: file.write(lines))

    def _encode(self, engine: "Engine", chunk: Chunk) -> "tuple[Encoded, list[list[str]]]":
        ranker, options = engine.ranker(), self._options()
        if self._job.query is not None:
            with self._placed(chunk.rows):
                return ranker.encode(self._job.query, chunk.texts, options), []
        parts, documents = [], []
        for row, values in _rows(chunk):
            documents.append(self._documents(row, values))
            with self._placed([row]):
                parts.append(ranker.encode(row.text, documents[-1], options))
        return ranker.joined(parts), documents

    def _documents(self, row: Row, values: Mapping[str, Any]) -> list[str]:
        """Return the documents of a row; one query's rows are documents themselves."""
        if self._one_query:
            return [row.text]
        found = values[DOCUMENTS]
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            where = self._source.where(row.place).replace(
                repr(self._source.column), repr(DOCUMENTS)
            )
            raise InputError(f"{where}: a list of texts is expected")
        return found

    def _lines(
        self, engine: "Engine", chunk: Chunk, documents: Sequence[list[str]], raw: Floats
    ) -> Iterator[bytes]:
        """Write a line per query."""
        start = 0
        numbered = enumerate(_rows(chunk), chunk.first)
        for (index, (_, values)), texts in zip(numbered, documents, strict=True):
            part = raw[start : start + len(texts)]
            start += len(texts)
            scores = part if self._job.raw_scores else engine.ranker().activated(part)
            results = [self._result(i, scores[i], texts[i]) for i in self._order(part)]
            kept = json_fields({name: values[name] for name in self._job.keep})
            yield b'{"index":%d,%b"results":%b}\n' % (index, kept, orjson.dumps(results))

    def _result(self, index: int, score: float, text: str) -> dict[str, Any]:
        entry = {"index": index, "score": float(score)}
        return {**entry, "text": text} if self._job.texts else entry

    def _order(self, raw: Floats) -> list[int]:
        order: list[int] = np.argsort(-raw, kind="stable")[: self._job.top_n].tolist()
        return order

    def _join(self, paths: Sequence[Path], file: BinaryIO) -> None:
        if not self._one_query:
            for path in paths:
                file.write(path.read_bytes())
            return
        raw = np.concatenate(self._raw)
        scores = raw if self._job.raw_scores else self._activated(raw)
        for rank, index in enumerate(self._order(raw), 1):
            text, kept = self._kept[index]
            ending = orjson.dumps({"score": float(scores[index]), "text": text})[1:]
            file.write(b'{"rank":%d,"index":%d,%b%b\n' % (rank, index, kept, ending))

    def _activated(self, raw: Floats) -> Floats:
        from rose.models.output import activate_scores

        scoring = plan_checkpoint(self._job.model, tasks=(_task(self._job),)).scoring
        if scoring is None:  # vectors are compared: there is no activation
            return raw
        return activate_scores(raw, scoring.card.activation)

    @contextlib.contextmanager
    def _placed(self, rows: Sequence[Row]) -> Iterator[None]:
        """Name file and line where an error is about a text."""
        try:
            yield
        except (RequestError, NonFiniteError) as error:
            found = re.fullmatch(r"documents\[(\d+)\]", error.field or "")
            if found is None and error.field != QUERY:
                raise
            row = rows[int(found[1])] if found and self._one_query else rows[0]
            what = QUERY if found is None else "document"
            message = str(error).replace(f"'{error.field}'", f"the {what}")
            message = message.replace("pass truncate=True", "use --truncate")
            if self._one_query and found is None:
                raise RequestError(f"--query: {message}", QUERY) from error
            raise InputError(f"{self._source.where(row.place)}: {message}") from error


def _rows(chunk: Chunk) -> Iterator[tuple[Row, dict[str, Any]]]:
    return zip(chunk.rows, chunk.kept_rows(), strict=True)
