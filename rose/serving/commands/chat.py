"""`rose chat`."""

import contextlib
import io
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rose.serving.commands.options import Device, Dtype, MaxModelLen, Model, Quantization

if TYPE_CHECKING:
    from rose.runtime.options import SamplingParams
    from rose.serving.local import Engine

HELP = (
    "/reset starts over, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer, /help shows this line."
)

Messages = list[dict[str, str]]


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="0 takes the most likely token.", show_default="the checkpoint's, or 1"
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer at most.")] = 1024,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same answers.", show_default="another one each time"
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Chat with a model in the terminal."""
    if sys.stderr.isatty():
        typer.secho(f"loading {model} ...", dim=True, err=True)
    from rose.serving.local import Engine

    with Engine(
        model,
        device=device,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        tasks=("generate",),
        max_num_seqs=1,
    ) as engine:
        params = engine.sampling_params(temperature=temperature, max_tokens=max_tokens, seed=seed)
        start = [{"role": "system", "content": system}] if system else []
        # A model that cannot chat says so now and not after the first question.
        engine.chat_prompt([*start, {"role": "user", "content": "Hello"}])
        typer.secho(f"{engine.card.name} - {HELP}", dim=True)
        _converse(engine, start, params)


def _converse(engine: "Engine", start: Messages, params: "SamplingParams") -> None:
    messages = list(start)
    _prepare_input()
    while (text := _ask()) not in (None, "/exit"):
        if text == "/reset":
            messages = list(start)
        elif text.startswith("/") and text[1:].isalpha():
            typer.secho(HELP if text == "/help" else f"{text} is no command: {HELP}", dim=True)
        elif text:
            messages = _add_answer(engine, [*messages, {"role": "user", "content": text}], params)


def _prepare_input() -> None:
    """Let lines be edited where the system can do that, and read any bytes as text."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it from now on
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def _ask() -> str | None:
    """Read a line; Ctrl-C drops what is typed, None is the end of the input."""
    while True:
        try:
            return input("> ").strip()
        except KeyboardInterrupt:
            typer.echo()
        except EOFError:
            typer.echo()
            return None


def _add_answer(engine: "Engine", messages: Messages, params: "SamplingParams") -> Messages:
    """Return the conversation with its answer, or without the question if that cannot be asked."""
    try:
        answer = _answer(engine, messages, params)
    except (ValueError, ArithmeticError) as error:  # too long, refused, or not finite
        typer.secho(f"error: {error} (/reset starts over)", err=True)
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": answer}]


def _answer(engine: "Engine", messages: Messages, params: "SamplingParams") -> str:
    """Print an answer as it comes; Ctrl-C ends it, and what has come counts."""
    pieces: list[str] = []
    try:
        with contextlib.closing(engine.stream(engine.chat_prompt(messages), params)) as stream:
            for piece in stream:
                pieces.append(piece)
                typer.echo(piece, nl=False)
    except KeyboardInterrupt:
        typer.secho(" (stopped)", nl=False, dim=True)
    typer.echo()
    return "".join(pieces)
