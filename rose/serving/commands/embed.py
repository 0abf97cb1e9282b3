"""`rose embed`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rose.runtime.options import OutputDtype
from rose.serving.commands.options import (
    Attention,
    Deterministic,
    Device,
    Dtype,
    LogLevel,
    MaxModelLen,
    Model,
    Quantization,
)

if TYPE_CHECKING:
    from rose.serving.offline.embed import Summary

TEXTS, VECTORS, WORK = "The texts", "The vectors", "Stopping and going on"


def embed(
    model: Model,
    input_file: Annotated[
        str,
        typer.Argument(
            help=".txt (a text a line), .jsonl, .csv or .parquet; - is standard input, a text "
            "a line.",
            metavar="INPUT",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="A .npy, .jsonl or .parquet file.", show_default=False),
    ],
    column: Annotated[
        str | None,
        typer.Option(
            help="Column of the texts.",
            show_default="text, or the only column of strings",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Column to copy to a .jsonl or .parquet output; repeatable.", rich_help_panel=TEXTS
        ),
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(
            help="Prompt of the checkpoint to put before each text; see rose inspect.",
            show_default="the checkpoint's",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Words to put before each text.", rich_help_panel=TEXTS)
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Cut a text that is too long for the model instead of stopping at it.",
            rich_help_panel=TEXTS,
        ),
    ] = False,
    dimensions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Keep so many numbers of each vector.",
            show_default="all",
            rich_help_panel=VECTORS,
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1.",
            show_default="as the checkpoint says",
            rich_help_panel=VECTORS,
        ),
    ] = None,
    output_dtype: Annotated[
        OutputDtype, typer.Option(help="Type of the numbers.", rich_help_panel=VECTORS)
    ] = "float32",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    attention: Attention = "auto",
    max_model_len: MaxModelLen = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per batch.", show_default="2048 on a CPU, 16384 on a GPU"),
    ] = None,
    deterministic: Deterministic = False,
    chunk_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Texts between two points from which to go on; fewer where texts are long.",
            rich_help_panel=WORK,
        ),
    ] = 2048,
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
    """Embed a file of texts.

    For example, a vector for each line of a file:

    [bold]rose embed ./all-MiniLM-L6-v2 texts.txt -o vectors.npy[/bold]

    or for the column "body" of a table, next to its column "id":

    [bold]rose embed ./my-model posts.csv --column body --keep id -o out.parquet[/bold]

    A .npy output has row i for text i, a .jsonl output objects with index and
    embedding, a .parquet output a column embedding. A blank line of a .txt
    file is a text too, an empty one. Files may be larger than memory.

    What is done is kept in OUTPUT.partial until all is: after Ctrl-C or a
    crash, the same command goes on where it stopped.
    """
    from rose.serving.offline.embed import EmbedFile, embed_file
    from rose.serving.offline.errors import StoppedError
    from rose.serving.offline.progress import open_display
    from rose.serving.process import set_up_logging

    set_up_logging(log_level, "embed")
    job = EmbedFile(
        model=model,
        input=input_file,
        output=output,
        column=column,
        keep=tuple(dict.fromkeys(keep or ())),
        prompt_name=prompt_name,
        prompt=prompt,
        dimensions=dimensions,
        normalize=normalize,
        output_dtype=output_dtype,
        truncate=truncate,
        device=device,
        dtype=dtype,
        quantization=quantization,
        attention=attention,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        deterministic=deterministic,
        chunk_size=chunk_size,
        force=force,
        restart=restart,
    )
    try:
        with open_display() as display:
            summary = embed_file(job, display)
    except StoppedError as error:
        typer.echo(error, err=True)
        raise typer.Exit(130) from None
    typer.echo(_describe(output, summary))


def _describe(output: Path, summary: "Summary") -> str:
    line = f"{output}: {summary.texts:,} texts, {summary.tokens:,} tokens"
    if summary.cut:
        line += f"; {summary.cut:,} texts were cut to {summary.limit:,} tokens"
    return line
