"""`rose embed`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rose.runtime.options import OutputDtype
from rose.serving.commands.file_flags import BatchFlags, WorkFlags
from rose.serving.commands.flags import as_arguments, spread
from rose.serving.commands.options import LogLevel, Model
from rose.serving.offline.wording import counted

if TYPE_CHECKING:
    from rose.serving.offline.embed import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFlags:
    """The texts"""  # noqa: D415 - the title of its part of --help

    column: Annotated[
        str | None,
        typer.Option(
            help="Column of the texts.", show_default="text, or the only column of strings"
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Column to copy to a .jsonl or .parquet output; repeatable."),
    ] = None
    prompt_name: Annotated[
        str | None,
        typer.Option(
            help="Prompt of the checkpoint to put before each text; see rose inspect.",
            show_default="the checkpoint's",
        ),
    ] = None
    prompt: Annotated[str | None, typer.Option(help="Words to put before each text.")] = None
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Cut a text that is too long for the model instead of stopping at it.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorFlags:
    """The vectors"""  # noqa: D415 - the title of its part of --help

    dimensions: Annotated[
        int | None,
        typer.Option(min=1, help="Keep so many numbers of each vector.", show_default="all"),
    ] = None
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1.",
            show_default="as the checkpoint says",
        ),
    ] = None
    output_dtype: Annotated[OutputDtype, typer.Option(help="Type of the numbers.")] = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFlags(WorkFlags):
    """Stopping and going on"""  # noqa: D415 - the title of its part of --help

    chunk_size: Annotated[
        int,
        typer.Option(
            min=1, help="Texts between two points from which to go on; fewer where texts are long."
        ),
    ] = 2048


@spread
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
    texts: TextFlags,
    vectors: VectorFlags,
    engine: BatchFlags,
    work: ChunkFlags,
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
    options = as_arguments(texts, vectors, engine, work)
    options["keep"] = tuple(dict.fromkeys(texts.keep or ()))
    job = EmbedFile(model=model, input=input_file, output=output, **options)
    try:
        with open_display() as display:
            summary = embed_file(job, display)
    except StoppedError as error:
        typer.echo(error, err=True)
        raise typer.Exit(130) from None
    typer.echo(_describe(output, summary))


def _describe(output: Path, summary: "Summary") -> str:
    line = f"{output}: {counted(summary.texts, 'text')}, {counted(summary.tokens, 'token')}"
    if summary.cut:
        cut = counted(summary.cut, "text was", "texts were")
        line += f"; {cut} cut to {counted(summary.limit, 'token')}"
    return line
