"""`rose generate`: a file of prompts in, a file of completions out, saved as they end.

Rows end in any order, and what has ended is saved every few seconds; what a stop loses is computed
again. The output is put in order at the end. Greedy and seeded rows do not depend on what ran
beside them, so a job that was stopped and went on gives the same bytes as one that ran through.
(That is up to rounding: in half precision two tokens are now and then so close that it decides.
`deterministic` leaves nothing beside a row.)
"""

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from rose.models.plan import Plan, plan_checkpoint
from rose.runtime.errors import NonFiniteError, RequestError
from rose.runtime.options import SamplingParams
from rose.serving.gateway.templates import TemplateError
from rose.serving.gateway.tokenization import TokenizationError
from rose.serving.interrupts import interrupts_held
from rose.serving.offline.chunks import Chunk, cut_chunks
from rose.serving.offline.completions import (
    CompletionOutput,
    Group,
    Record,
    completion_output,
    in_order,
    read_records,
    save_records,
)
from rose.serving.offline.errors import InputError, OutputError
from rose.serving.offline.job import check_output, choose_device, digest_model, resumable
from rose.serving.offline.partial import DoneChunk, Partial, open_partial
from rose.serving.offline.progress import Display, Meter
from rose.serving.offline.prompts import Chat, make_prompt, read_schema
from rose.serving.offline.sources import Row, Source, open_source
from rose.serving.offline.wording import counted

if TYPE_CHECKING:
    from rose.serving.local import Engine
    from rose.serving.local_generation import Completion

MESSAGES = "messages"
MAX_TOKENS = 256
SAVE_ROWS = 256
SAVE_S = 2.0
# Rows that are looked at, and written, together.
GROUP_ROWS, GROUP_CHARS = 1024, 1 << 22

# What is wrong with one row alone.
ROW_ERRORS = (RequestError, NonFiniteError, TemplateError, TokenizationError)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFile:
    """What to continue and how; the fields are the options of `rose generate`."""

    model: str
    input: str
    output: Path
    column: str | None = None
    keep: tuple[str, ...] = ()
    output_column: str = "text"
    chat: bool = False
    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int = MAX_TOKENS
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    attention: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    kv_cache_memory: int | None = None
    deterministic: bool = False
    strict: bool = False
    force: bool = False
    restart: bool = False


# The options that the completions depend on.
_FACTS = (
    "chat",
    "system",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_tokens",
    "seed",
    "stop",
    "device",
    "dtype",
    "quantization",
    "attention",
    "max_model_len",
    "deterministic",
)


@dataclass(slots=True)
class Summary:
    """What was written: rows, how many of them have an error, tokens of the others."""

    rows: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, record: Record) -> None:
        """Count a row."""
        self.rows += 1
        self.errors += record.error is not None
        self.prompt_tokens += record.prompt_tokens or 0
        self.completion_tokens += record.completion_tokens or 0


def generate_file(job: GenerateFile, display: Display) -> Summary:
    """Continue the prompts of a file; goes on where an earlier run of the same job stopped.

    Raises:
        InputError: the input cannot be read, or with `strict` a row cannot be served; names file
            and line.
        OutputError: the output cannot be written, or an earlier run did something else.
        CheckpointError: the model cannot be served.
        RequestError: an option does not fit the model.
        StoppedError: Ctrl-C; says how to go on.
    """
    check_output(job.output, force=job.force)
    output = completion_output(job.output, job.keep, job.output_column)
    source = _open_source(job)
    if job.system is not None and not (job.chat or source.holds_lists):
        raise InputError("--system: a text that is continued has no system message; add --chat")
    grammar = read_schema(job.json_schema)
    plan = plan_checkpoint(job.model, max_model_len=job.max_model_len, tasks=("generate",))
    job = replace(job, device=choose_device(job.device))
    with open_partial(job.output) as partial, resumable(partial):
        if job.restart:
            partial.clear()
        partial.resume(_facts(job, source, plan, grammar))
        return _Run(job, source, output, partial, display, grammar).run()


def _open_source(job: GenerateFile) -> Source:
    return open_source(job.input, column=job.column, keep=job.keep, list_column=MESSAGES)


def _facts(job: GenerateFile, source: Source, plan: Plan, grammar: str | None) -> dict[str, Any]:
    """List what the completions depend on, by the names that users know."""
    options = {f"--{name.replace('_', '-')}": getattr(job, name) for name in _FACTS}
    facts = {"MODEL": digest_model(plan), "--column": source.column, **options}
    return facts if grammar is None else {**facts, "the file of --json-schema": grammar}


@dataclass(frozen=True, slots=True)
class _Item:
    """A row to be continued; `share` is its part of the source, in the unit of `Source.total`."""

    index: int
    row: Row
    share: int


class _Run:
    """One run of a job."""

    def __init__(
        self,
        job: GenerateFile,
        source: Source,
        output: CompletionOutput,
        partial: Partial,
        display: Display,
        grammar: str | None,
    ) -> None:
        self._job, self._source, self._output = job, source, output
        self._partial, self._display, self._grammar = partial, display, grammar
        self._chat: Chat = "messages" if source.holds_lists else "text" if job.chat else None
        self._meter = Meter(source.total)
        self._summary = Summary()
        self._done: dict[int, str] = {}  # digests of the prompts that an earlier run has done
        self._under_way: dict[int, _Item] = {}
        self._unsaved: list[Record] = []
        self._saved_at = time.monotonic()

    def run(self) -> Summary:
        """Find what is done, do the rest, and put the output together."""
        self._find_done()
        items = self._items()
        first = next(items, None)
        if first is not None:
            self._generate(itertools.chain([first], items))
        elif not self._partial.chunks:
            raise InputError(f"{self._source.label} holds no prompts")
        if self._done:
            raise self._changed("its end")
        self._partial.finish(self._join)
        return self._summary

    def _find_done(self) -> None:
        for record in read_records(self._partial.paths):
            self._done[record.index] = record.digest
            self._summary.add(record)
        if self._job.strict and self._summary.errors:
            raise OutputError(
                f"{self._partial.folder} was begun without --strict and has "
                f"{counted(self._summary.errors, 'row')} with an error. Leave it out to go on, "
                "or begin afresh with --restart."
            )
        self._meter.texts_before = len(self._done)

    def _items(self) -> Iterator[_Item]:
        """Yield the rows that are not done; those that are have to be what they were."""
        read = 0
        for index, row in enumerate(self._rows()):
            share, read = row.done - read, row.done
            digest = self._done.pop(index, None)
            if digest is None:
                yield _Item(index, row, share)
                continue
            if digest != _digest(row):
                raise self._changed(f"{self._source.unit} {row.place}")
            self._meter.done_before += share
            self._meter.done += share

    def _rows(self) -> Iterator[Row]:
        """Yield the rows, of which the columns that are kept can be written."""
        if not self._job.keep:
            yield from self._source.rows
            return
        for chunk in cut_chunks(self._source.rows, GROUP_ROWS, GROUP_CHARS):
            self._output.prepare(chunk)
            yield from chunk.rows

    def _changed(self, place: str) -> InputError:
        return InputError(
            f"{self._source.label} differs at {place} from what {self._partial.folder} was begun "
            "with. --restart begins afresh."
        )

    def _generate(self, items: Iterator[_Item]) -> None:
        with self._engine() as engine:
            params = self._params(engine)
            self._meter.began = self._saved_at = time.monotonic()
            runs = engine.generate_each(
                self._prompts(engine, items, params),
                stop=self._job.stop,
                on_tokens=self._count_tokens,
            )
            try:
                with closing(runs):
                    for number, outcome in runs:
                        self._end(self._under_way.pop(number), outcome)
            finally:
                self._save()

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
            max_num_seqs=1 if job.deterministic else job.max_num_seqs,
            kv_cache_memory=job.kv_cache_memory,
            tasks=("generate",),
        )

    def _params(self, engine: "Engine") -> SamplingParams:
        job = self._job
        return engine.sampling_params(
            temperature=job.temperature,
            top_p=job.top_p,
            top_k=job.top_k,
            min_p=job.min_p,
            repetition_penalty=job.repetition_penalty,
            max_tokens=job.max_tokens,
            grammar=self._grammar,
        )

    def _prompts(
        self, engine: "Engine", items: Iterable[_Item], params: SamplingParams
    ) -> Iterator[tuple[str | list[int], SamplingParams]]:
        """Yield prompts as the engine asks for them; a row without one ends here."""
        numbers = itertools.count()
        for item in items:
            try:
                prompt = make_prompt(engine, item.row, self._chat, self._job.system)
            except ROW_ERRORS as error:
                self._end(item, error)
                continue
            self._under_way[next(numbers)] = item
            yield prompt, self._row_params(params, item.index)

    def _row_params(self, params: SamplingParams, index: int) -> SamplingParams:
        """Give each row a seed of its own, and keep rows from sharing work where they must not."""
        seed = None if self._job.seed is None else self._job.seed + index
        salt = str(index) if self._job.deterministic else ""
        return msgspec.structs.replace(params, seed=seed, cache_salt=salt)

    def _count_tokens(self, tokens: int) -> None:
        self._meter.tokens += tokens
        self._display(self._meter)

    def _end(self, item: _Item, outcome: "Completion | Exception") -> None:
        if isinstance(outcome, ROW_ERRORS):
            if self._job.strict:
                raise InputError(f"{self._source.where(item.row.place)}: {outcome}") from outcome
        elif isinstance(outcome, Exception):
            raise outcome
        record = _record(item, outcome)
        self._summary.add(record)
        self._unsaved.append(record)
        self._meter.texts += 1
        self._meter.done += item.share
        if len(self._unsaved) >= SAVE_ROWS or time.monotonic() - self._saved_at > SAVE_S:
            self._save()

    def _save(self) -> None:
        if not self._unsaved:
            return
        records, tokens = self._unsaved, sum(r.completion_tokens or 0 for r in self._unsaved)
        with interrupts_held():
            self._partial.add(
                DoneChunk(len(records), tokens), lambda file: save_records(records, file)
            )
            self._unsaved, self._saved_at = [], time.monotonic()

    def _join(self, paths: Iterable[Path], file: BinaryIO) -> None:
        self._output.write(self._groups(in_order(read_records(paths))), file)

    def _groups(self, records: Iterator[Record]) -> Iterator[Group]:
        """Put the columns that are kept, read once more, beside the records."""
        if not self._job.keep:
            while group := list(itertools.islice(records, GROUP_ROWS)):
                yield None, group
            return
        for chunk in cut_chunks(_open_source(self._job).rows, GROUP_ROWS, GROUP_CHARS):
            group = list(itertools.islice(records, len(chunk.rows)))
            self._check_same(chunk, group)
            yield chunk, group
        if next(records, None) is not None:
            raise self._changed("its end")

    def _check_same(self, chunk: Chunk, group: list[Record]) -> None:
        digests = [record.digest for record in group]
        for row, digest in itertools.zip_longest(chunk.rows, digests):
            if digest != _digest(row):
                raise self._changed(f"{self._source.unit} {row.place}")


def _digest(row: Row) -> str:
    """Hash a prompt, to tell whether an input is still the same."""
    return hashlib.blake2b(row.text.encode(), digest_size=12).hexdigest()


def _record(item: _Item, outcome: "Completion | Exception") -> Record:
    digest = _digest(item.row)
    if isinstance(outcome, Exception):
        return Record(index=item.index, digest=digest, error=str(outcome))
    return Record(
        index=item.index,
        digest=digest,
        text=outcome.text,
        finish_reason=outcome.finish_reason,
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=len(outcome.token_ids),
    )
