"""`rose rerank`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rose.serving.commands.file_flags import BatchFlags, WorkFlags
from rose.serving.commands.flags import as_arguments, spread
from rose.serving.commands.options import LogLevel, Model
from rose.serving.offline.wording import counted

if TYPE_CHECKING:
    from rose.serving.offline.rerank import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFlags:
    """The documents"""  # noqa: D415 - the title of its part of --help

    column: Annotated[
        str | None,
        typer.Option(
            help="Column of the documents with --query, of the queries without.",
            show_default="text, or the only column of strings; query",
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Column to copy to the output; repeatable."),
    ] = None
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Cut a pair that is too long for the model instead of stopping at it.",
        ),
    ] = False
    max_tokens_per_doc: Annotated[
        int | None,
        typer.Option(min=1, help="Cut each document to so many tokens.", show_default="not"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFlags:
    """The scores"""  # noqa: D415 - the title of its part of --help

    top_n: Annotated[
        int | None,
        typer.Option(min=1, help="Keep the best so many.", show_default="all"),
    ] = None
    texts: Annotated[
        bool,
        typer.Option("--texts", help="Without --query: repeat the documents."),
    ] = False
    raw_scores: Annotated[
        bool,
        typer.Option("--raw-scores", help="Leave out the checkpoint's activation."),
    ] = False
    instruction: Annotated[
        str | None,
        typer.Option(
            help="What to look for, for models whose prompt has a place for it.",
            show_default="the model's",
        ),
    ] = None
    prompt_name: Annotated[
        str | None,
        typer.Option(
            help="Prompt of the checkpoint to put before the query; see rose inspect.",
            show_default="the checkpoint's",
        ),
    ] = None
    prompt: Annotated[str | None, typer.Option(help="Words to put before the query.")] = None
    rank_by_cosine: Annotated[
        bool,
        typer.Option(
            "--rank-by-cosine", help="Let an embedder rank, by the cosine of its vectors."
        ),
    ] = False


@spread
def rerank(
    model: Model,
    input_file: Annotated[
        str,
        typer.Argument(
            help="With --query: .txt (a document a line), .jsonl, .csv or .parquet, or - for "
            "standard input. Without: .jsonl or .parquet whose rows have a query and documents.",
            metavar="INPUT",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .jsonl file.", show_default=False)
    ],
    documents: DocumentFlags,
    scores: ScoreFlags,
    engine: BatchFlags,
    work: WorkFlags,
    query: Annotated[
        str | None,
        typer.Option(help="What is looked for.", show_default="each row has its own"),
    ] = None,
    log_level: LogLevel = "warning",
) -> None:
    """Rank documents by a query.

    The command is the task: what can rank does, an LLM too, which `rose serve`
    lets rank only with --task score.

    For example, the nine lines of a file that answer a question best:

    [bold]rose rerank ./my-ranker lines.txt --query "who keeps bees?" --top-n 9 -o best.jsonl[/bold]

    or the documents of each row by the query of the row:

    [bold]rose rerank ./my-ranker questions.jsonl -o ranked.jsonl[/bold]

    With --query a line of the output is a document with rank, index (the row that
    it was), score and text, the best first. Without, a line is a row of the
    input, with results: index and score of each document, the best first.

    What is done is kept in OUTPUT.partial until all is: after Ctrl-C or a
    crash, the same command goes on where it stopped.
    """
    from rose.serving.offline.errors import StoppedError
    from rose.serving.offline.progress import open_display
    from rose.serving.offline.rerank import RerankFile, rerank_file
    from rose.serving.process import set_up_logging

    set_up_logging(log_level, "rerank")
    options = as_arguments(documents, scores, engine, work)
    options["keep"] = tuple(dict.fromkeys(documents.keep or ()))
    job = RerankFile(model=model, input=input_file, output=output, query=query, **options)
    try:
        with open_display() as display:
            summary = rerank_file(job, display)
    except StoppedError as error:
        typer.echo(error, err=True)
        raise typer.Exit(130) from None
    typer.echo(_describe(output, summary))


def _describe(output: Path, summary: "Summary") -> str:
    parts = (
        counted(summary.queries, "query", "queries"),
        counted(summary.documents, "document"),
        counted(summary.tokens, "token"),
    )
    line = f"{output}: {', '.join(parts)}"
    cut = counted(summary.truncated, "token was", "tokens were")
    return f"{line}; {cut} cut" if summary.truncated else line
