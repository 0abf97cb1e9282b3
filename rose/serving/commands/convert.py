"""`rose convert`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rose.serving.commands.options import Quantization, Tasks, parse_tasks


def convert(
    source: Annotated[
        Path, typer.Argument(help="A GGUF file, or a model folder.", metavar="MODEL")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", metavar="OUT")],
    quantization: Quantization = None,
    task: Tasks = None,
    dtype: Annotated[
        str, typer.Option(help="Of a GGUF file's weights: bfloat16, float16 or float32.")
    ] = "bfloat16",
    tokenizer_from: Annotated[
        Path | None,
        typer.Option(
            help="Folder whose tokenizer.json to take, for SentencePiece and WordPiece.",
            show_default="the file's own vocabulary",
        ),
    ] = None,
) -> None:
    """Turn a GGUF file into a model folder, or round the weights of a folder.

    The first writes weights, config, tokenizer and chat template. The second
    writes the folder once more with weights of 8 or 4 bits: it is served as the
    first is with --quantization, and takes less disk. For example:

    [bold]rose convert SmolLM2.Q4_1.gguf models/SmolLM2[/bold]

    [bold]rose convert models/SmolLM2 models/SmolLM2-int8 --quantization int8[/bold]
    """
    if source.is_dir() and quantization is None:
        raise ValueError(
            f"{source} is a model folder: add --quantization int8 (or int4) to round its weights"
        )
    if task is not None and quantization is None:
        raise ValueError("--task goes with --quantization alone")
    if not source.is_dir() and quantization is not None:
        what = "is no model folder" if source.exists() else "does not exist"
        raise ValueError(
            f"{source} {what}: --quantization rounds the weights of a model folder, which "
            "`rose convert` without it makes of a GGUF file"
        )
    tasks = parse_tasks(task)
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as bar:
        row = bar.add_task("converting", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(row, completed=done, total=total, description=what)

        if quantization is None:
            _convert_gguf(source, out, dtype, show, tokenizer_from)
        else:
            from rose.models.convert_quantized import convert_quantized

            convert_quantized(source, out, quantization, show, tasks=tasks or None)
    typer.echo(f"wrote {out}")


def _convert_gguf(
    source: Path,
    out: Path,
    dtype: str,
    show: Callable[[int, int, str], None],
    tokenizer_from: Path | None,
) -> None:
    from rose.models.gguf import convert_gguf

    try:
        convert_gguf(source, out, dtype, show, tokenizer_from=tokenizer_from)
    except ImportError as error:  # of the extra that reads GGUF files
        raise ValueError(str(error)) from error
