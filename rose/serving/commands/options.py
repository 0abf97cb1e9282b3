"""Options that several commands share."""

import re
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from rose.models.card import Task

Model = Annotated[str, typer.Argument(help="A model folder.", metavar="MODEL")]
Device = Annotated[
    str, typer.Option(help="Where to run: cpu, cuda, cuda:1; auto takes a GPU if there is one.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        help="Type of the weights; auto is the checkpoint's on a GPU.", case_sensitive=False
    ),
]
Quantization = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option(
        help="Round the weights, on a CPU: int8 for all models, int4 for those that generate.",
        show_default="as the checkpoint says",
        case_sensitive=False,
    ),
]
Attention = Annotated[str, typer.Option(help="Attention back end, or auto.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Longest input in tokens.", show_default="as the checkpoint says"),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per batch.", show_default="measured at start-up"),
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Sequences that are generated at one time.")]
KvCacheMemory = Annotated[
    int | None,
    typer.Option(
        parser=lambda text: size(text),
        metavar="SIZE",
        help="Memory for keys and values of generation, such as 2GiB.",
        show_default="a share of the free memory",
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        help="What to serve the model for: embed, generate, score, classify; several with commas.",
        show_default="what the checkpoint is for",
    ),
]
StrictDimensions = Annotated[
    bool,
    typer.Option(
        "--strict-dimensions",
        help="Refuse `dimensions` that the checkpoint does not declare as trained for.",
    ),
]
Truncate = Annotated[
    bool, typer.Option("--truncate", help="Cut input that is too long unless a request says no.")
]
RankByCosine = Annotated[
    bool,
    typer.Option(
        "--rank-by-cosine",
        help="Let embedders answer /v1/rerank and /v1/score too, by the cosine of their vectors.",
    ),
]
RequestTimeout = Annotated[
    float,
    typer.Option(min=0.001, metavar="S", help="Seconds until an unanswered request ends with 504."),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bit-equal vectors whatever else is in the batch.")
]
Warmup = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Run these before the model is ready: 8x64 is 8 texts of 64 tokens, 8 alone a decode "
        "step of 8 sequences; separate with commas.",
        show_default="nothing",
    ),
]
MaxGraphTokens = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="On a GPU, batches of up to so many tokens run as device graphs; 0 turns them off.",
        show_default="measured at start-up",
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(help="Least serious messages to log.", case_sensitive=False),
]
LogFormat = Annotated[
    Literal["text", "json"], typer.Option(help="A line of text a message, or of JSON.")
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        help="Send traces there, such as http://localhost:4318; needs the extra otel.",
        metavar="URL",
        show_default="no traces",
    ),
]
Host = Annotated[str, typer.Option(help="Interface to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar="ROSE_API_KEY",
        help="Bearer key to ask for; repeatable. Other users of the machine see it in the list of "
        "processes: the variable and --api-key-file hide it.",
        show_default="everybody is let in",
    ),
]
KeysFolder = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        help="Folder with the keys that `rose keys` made, for engines and gateways over tcp.",
        metavar="FOLDER",
        show_default="none",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File with a bearer key a line.", metavar="FILE", show_default="none"),
]


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size(text: object) -> int:
    """Read a size that was given as an option."""
    try:
        return parse_size(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_size(text: str) -> int:
    """Read a size in bytes: 1048576, 512MB, 2GiB.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 512MiB or 2GB")
    size = float(match[1]) * _UNITS[match[2] or ""]
    if size >= 2**63:
        raise ValueError(f"{text[:50]!r} is more than any machine has")
    return int(size)


def parse_tasks(text: str | None) -> tuple[str, ...]:
    """Read a list of tasks; None is none.

    Raises:
        ValueError: a name is no task.
    """
    names = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    known = get_args(Task)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--task: {unknown[0]!r} is none of {', '.join(known)}")
    return names
