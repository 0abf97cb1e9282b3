"""Groups of options of the commands that work on files."""

from dataclasses import dataclass
from typing import Annotated

import typer

from rose.serving.commands.options import (
    Attention,
    Deterministic,
    Device,
    Dtype,
    MaxModelLen,
    Quantization,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """The model"""  # noqa: D415 - the title of its part of --help

    device: Device = "auto"
    dtype: Dtype = "auto"
    quantization: Quantization = None
    attention: Attention = "auto"
    max_model_len: MaxModelLen = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFlags(ModelFlags):
    """The model"""  # noqa: D415 - the title of its part of --help

    max_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per batch.", show_default="2048 on a CPU, 16384 on a GPU"),
    ] = None
    deterministic: Deterministic = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFlags:
    """Stopping and going on"""  # noqa: D415 - the title of its part of --help

    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False
    restart: Annotated[bool, typer.Option("--restart", help="Drop what an earlier run did.")] = (
        False
    )
