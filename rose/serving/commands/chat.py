"""`rose chat`."""

from typing import TYPE_CHECKING, Annotated

import typer

from rose.serving.commands.options import Device, Dtype, MaxModelLen, Model

if TYPE_CHECKING:
    from rose.runtime.options import SamplingParams
    from rose.serving.local import Engine

HELP = "/reset starts over, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the most likely token.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer at most.")] = 1024,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
) -> None:
    """Chat with a model in the terminal."""
    from rose.serving.local import Engine

    with Engine(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        tasks=("generate",),
        max_num_seqs=1,
    ) as engine:
        params = engine.sampling_params(temperature=temperature, max_tokens=max_tokens, seed=seed)
        typer.secho(f"{engine.card.name} - {HELP}", dim=True)
        _converse(engine, [{"role": "system", "content": system}] if system else [], params)


def _converse(engine: "Engine", start: list[dict[str, str]], params: "SamplingParams") -> None:
    messages = list(start)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(start)
        elif text:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(engine, messages, params)})


def _answer(engine: "Engine", messages: list[dict[str, str]], params: "SamplingParams") -> str:
    """Print an answer as it comes; Ctrl-C ends it, and what has come counts."""
    pieces: list[str] = []
    try:
        for piece in engine.stream(engine.chat_prompt(messages), params):
            pieces.append(piece)
            typer.echo(piece, nl=False)
    except KeyboardInterrupt:
        typer.secho(" (stopped)", nl=False, dim=True)
    typer.echo()
    return "".join(pieces)
