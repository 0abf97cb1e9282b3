"""`rose rerank`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rose.serving.commands.options import (
    Attention,
    Deterministic,
    Device,
    Dtype,
    LogLevel,
    MaxModelLen,
    Model,
)

if TYPE_CHECKING:
    from rose.serving.offline.rerank import Summary

DOCUMENTS, SCORES, WORK = "The documents", "The scores", "Stopping and going on"


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
    query: Annotated[
        str | None,
        typer.Option(help="What is looked for.", show_default="each row has its own"),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            help="Column of the documents with --query, of the queries without.",
            show_default="text, or the only column of strings; query",
            rich_help_panel=DOCUMENTS,
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Column to copy to the output; repeatable.", rich_help_panel=DOCUMENTS),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Cut a pair that is too long for the model instead of stopping at it.",
            rich_help_panel=DOCUMENTS,
        ),
    ] = False,
    max_tokens_per_doc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cut each document to so many tokens.",
            show_default="not",
            rich_help_panel=DOCUMENTS,
        ),
    ] = None,
    top_n: Annotated[
        int | None,
        typer.Option(
            min=1, help="Keep the best so many.", show_default="all", rich_help_panel=SCORES
        ),
    ] = None,
    texts: Annotated[
        bool,
        typer.Option(
            "--texts", help="Without --query: repeat the documents.", rich_help_panel=SCORES
        ),
    ] = False,
    raw_scores: Annotated[
        bool,
        typer.Option(
            "--raw-scores", help="Leave out the checkpoint's activation.", rich_help_panel=SCORES
        ),
    ] = False,
    instruction: Annotated[
        str | None,
        typer.Option(
            help="What to look for, for models whose prompt has a place for it.",
            show_default="the model's",
            rich_help_panel=SCORES,
        ),
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(
            help="Prompt of the checkpoint to put before the query; see rose inspect.",
            show_default="the checkpoint's",
            rich_help_panel=SCORES,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Words to put before the query.", rich_help_panel=SCORES)
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attention: Attention = "auto",
    max_model_len: MaxModelLen = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per batch.", show_default="2048 on a CPU, 16384 on a GPU"),
    ] = None,
    deterministic: Deterministic = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace an output that exists.", rich_help_panel=WORK),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Drop what an earlier run did.", rich_help_panel=WORK),
    ] = False,
    log_level: LogLevel = "warning",
) -> None:
    """Rank documents by a query.

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
    job = RerankFile(
        model=model,
        input=input_file,
        output=output,
        query=query,
        column=column,
        keep=tuple(dict.fromkeys(keep or ())),
        top_n=top_n,
        texts=texts,
        instruction=instruction,
        prompt_name=prompt_name,
        prompt=prompt,
        truncate=truncate,
        max_tokens_per_doc=max_tokens_per_doc,
        raw_scores=raw_scores,
        device=device,
        dtype=dtype,
        attention=attention,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        deterministic=deterministic,
        force=force,
        restart=restart,
    )
    try:
        with open_display() as display:
            summary = rerank_file(job, display)
    except StoppedError as error:
        typer.echo(error, err=True)
        raise typer.Exit(130) from None
    typer.echo(_describe(output, summary))


def _describe(output: Path, summary: "Summary") -> str:
    queries = "1 query" if summary.queries == 1 else f"{summary.queries:,} queries"
    line = f"{output}: {queries}, {summary.documents:,} documents, {summary.tokens:,} tokens"
    return f"{line}; {summary.truncated:,} tokens were cut" if summary.truncated else line
