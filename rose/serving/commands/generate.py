"""`rose generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rose.serving.commands.file_flags import ModelFlags, WorkFlags
from rose.serving.commands.flags import as_arguments, spread
from rose.serving.commands.options import KvCacheMemory, LogLevel, MaxNumSeqs, Model
from rose.serving.offline.wording import counted

if TYPE_CHECKING:
    from rose.serving.offline.generate import Summary

CHECKPOINT = "the checkpoint's"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFlags:
    """The prompts"""  # noqa: D415 - the title of its part of --help

    column: Annotated[
        str | None,
        typer.Option(
            help="Column of the prompts; in a .jsonl file also lists of messages, each with role "
            "and content.",
            show_default="text, messages, or the only column of strings",
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Take each prompt as a user's message and let the model answer it. Without, "
            "a text is continued as it is.",
        ),
    ] = False
    system: Annotated[
        str | None,
        typer.Option(help="System message that goes before each conversation."),
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Column to copy to the output; repeatable."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFlags:
    """The completions"""  # noqa: D415 - the title of its part of --help

    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per completion at most.")] = 256
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="0 takes the most likely token.", show_default=f"{CHECKPOINT}, or 1"
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Choose among the likeliest tokens that have this probability together; 1 is off.",
            show_default=f"{CHECKPOINT}, or 1",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Choose among so many likeliest tokens; 0 is off.",
            show_default=f"{CHECKPOINT}, or 0",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Leave out tokens below this part of the likeliest one's probability; 0 is off.",
            show_default=f"{CHECKPOINT}, or 0",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1, tokens that were there before become less likely.",
            show_default=f"{CHECKPOINT}, or 1",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same completions; row i takes the seed plus i.",
            show_default="another one each time",
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends a completion and is not part of it; repeatable."),
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(help="File with a JSON schema that every completion has to follow."),
    ] = None
    output_column: Annotated[str, typer.Option(help="Column of the completions.")] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictFlags(WorkFlags):
    """Stopping and going on"""  # noqa: D415 - the title of its part of --help

    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Stop at the first row that cannot be served instead of noting its error.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmFlags(ModelFlags):
    """The model"""  # noqa: D415 - the title of its part of --help

    max_num_seqs: MaxNumSeqs = 32
    kv_cache_memory: KvCacheMemory = None
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="One row at a time: slow, but nothing can run beside a row and change its bits.",
        ),
    ] = False


@spread
def generate(
    model: Model,
    input_file: Annotated[
        str,
        typer.Argument(
            help=".txt (a prompt a line), .jsonl, .csv or .parquet; - is standard input, a prompt "
            "a line.",
            metavar="INPUT",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="A .jsonl or .parquet file.", show_default=False),
    ],
    prompts: PromptFlags,
    completions: CompletionFlags,
    engine: LlmFlags,
    work: StrictFlags,
    log_level: LogLevel = "warning",
) -> None:
    """Let a model continue, or answer, each prompt of a file.

    For example, an answer to each line of a file:

    [bold]rose generate ./my-llm questions.txt --chat -o answers.jsonl[/bold]

    or a continuation of the column "body" of a table, next to its column "id":

    [bold]rose generate ./my-llm posts.csv --column body --keep id -o out.parquet[/bold]

    Row i of the output belongs to row i of the input, and has the columns kept,
    text, finish_reason (stop or length), prompt_tokens and completion_tokens. A
    row that cannot be served, such as one that is too long, has an error instead;
    the exit code is 1 then. Files may be larger than memory.

    What is done is kept in OUTPUT.partial until all is: after Ctrl-C or a
    crash, the same command goes on where it stopped.
    """
    from rose.serving.offline.errors import StoppedError
    from rose.serving.offline.generate import GenerateFile, generate_file
    from rose.serving.offline.progress import open_display
    from rose.serving.process import set_up_logging

    set_up_logging(log_level, "generate")
    options = as_arguments(prompts, completions, engine, work)
    options["keep"] = tuple(dict.fromkeys(prompts.keep or ()))
    options["stop"] = tuple(dict.fromkeys(completions.stop or ()))
    job = GenerateFile(model=model, input=input_file, output=output, **options)
    try:
        with open_display() as display:
            summary = generate_file(job, display)
    except StoppedError as error:
        typer.echo(error, err=True)
        raise typer.Exit(130) from None
    typer.echo(_describe(output, summary))
    if summary.errors:
        raise typer.Exit(1)


def _describe(output: Path, summary: "Summary") -> str:
    line = (
        f"{output}: {counted(summary.rows, 'row')}, {counted(summary.prompt_tokens, 'token')} in, "
        f"{counted(summary.completion_tokens, 'token')} out"
    )
    if summary.errors:
        line += f"; {counted(summary.errors, 'row has', 'rows have')} an error instead of a text"
    return line
