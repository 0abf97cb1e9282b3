"""Options that several commands share, and how they are written for a child process."""

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A model folder.", metavar="MODEL")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Attention = Annotated[str, typer.Option(help="Attention back end, or auto.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest input in tokens.", show_default="as the checkpoint says")
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per batch.", show_default="measured at start-up"),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bit-equal vectors whatever else is in the batch.")
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
Host = Annotated[str, typer.Option(help="Interface to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option("--api-key", envvar="ROSE_API_KEY", help="Bearer key to ask for; repeatable."),
]


def as_options(**values: object) -> list[str]:
    """Write values as command-line options, for a child process; None and False are left out."""
    options: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        options.append(f"--{name.replace('_', '-')}")
        if value is not True:
            options.append(str(value))
    return options
