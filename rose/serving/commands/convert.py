"""`rose convert`."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="A GGUF file.", metavar="MODEL.gguf")],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", metavar="OUT")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    tokenizer_from: Annotated[
        Path | None,
        typer.Option(
            help="Folder whose tokenizer.json to take, for SentencePiece models.",
            show_default="the file's own vocabulary",
        ),
    ] = None,
) -> None:
    """Turn a GGUF file into a model folder: weights, config, tokenizer, chat template.

    Example: rose convert SmolLM2.Q4_1.gguf models/SmolLM2
    """
    from rich.console import Console
    from rich.progress import Progress

    from rose.models.gguf import convert_gguf

    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("converting", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        try:
            convert_gguf(source, out, dtype, show, tokenizer_from=tokenizer_from)
        except ImportError as error:  # of the extra that reads GGUF files
            raise ValueError(str(error)) from error
    typer.echo(f"wrote {out}")
