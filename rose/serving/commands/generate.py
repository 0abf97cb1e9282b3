"""`rose generate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rose.serving.commands.options import (
    Attention,
    Device,
    Dtype,
    KvCacheMemory,
    LogLevel,
    MaxModelLen,
    MaxNumSeqs,
    Model,
    Quantization,
)

if TYPE_CHECKING:
    from rose.serving.offline.generate import Summary

PROMPTS, SAMPLING, WORK = "The prompts", "The completions", "Stopping and going on"
CHECKPOINT = "the checkpoint's"


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
    column: Annotated[
        str | None,
        typer.Option(
            help="Column of the prompts; in a .jsonl file also lists of messages, each with role "
            "and content.",
            show_default="text, messages, or the only column of strings",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Take each prompt as a user's message and let the model answer it. Without, "
            "a text is continued as it is.",
            rich_help_panel=PROMPTS,
        ),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            help="System message that goes before each conversation.", rich_help_panel=PROMPTS
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Column to copy to the output; repeatable.", rich_help_panel=PROMPTS),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per completion at most.", rich_help_panel=SAMPLING)
    ] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="0 takes the most likely token.",
            show_default=f"{CHECKPOINT}, or 1",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Choose among the likeliest tokens that have this probability together; 1 is off.",
            show_default=f"{CHECKPOINT}, or 1",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Choose among so many likeliest tokens; 0 is off.",
            show_default=f"{CHECKPOINT}, or 0",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Leave out tokens below this part of the likeliest one's probability; 0 is off.",
            show_default=f"{CHECKPOINT}, or 0",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1, tokens that were there before become less likely.",
            show_default=f"{CHECKPOINT}, or 1",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same completions; row i takes the seed plus i.",
            show_default="another one each time",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that ends a completion and is not part of it; repeatable.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON schema that every completion has to follow.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    output_column: Annotated[
        str, typer.Option(help="Column of the completions.", rich_help_panel=SAMPLING)
    ] = "text",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    attention: Attention = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 32,
    kv_cache_memory: KvCacheMemory = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="One row at a time: slow, but nothing can run beside a row and change its bits.",
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Stop at the first row that cannot be served instead of noting its error.",
            rich_help_panel=WORK,
        ),
    ] = False,
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
    job = GenerateFile(
        model=model,
        input=input_file,
        output=output,
        column=column,
        keep=tuple(dict.fromkeys(keep or ())),
        output_column=output_column,
        chat=chat,
        system=system,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        seed=seed,
        stop=tuple(dict.fromkeys(stop or ())),
        json_schema=json_schema,
        device=device,
        dtype=dtype,
        quantization=quantization,
        attention=attention,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory=kv_cache_memory,
        deterministic=deterministic,
        strict=strict,
        force=force,
        restart=restart,
    )
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
        f"{output}: {summary.rows:,} rows, {summary.prompt_tokens:,} tokens in, "
        f"{summary.completion_tokens:,} tokens out"
    )
    if summary.errors:
        line += f"; {summary.errors:,} rows have an error instead of a text"
    return line
