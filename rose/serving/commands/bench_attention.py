"""`rose bench attention`."""

from typing import Annotated

import typer

from rose.serving.commands.options import Device, Dtype, Model


def attention(
    model: Model,
    device: Device = "auto",
    dtype: Dtype = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the times, but leave the table as it is.")
    ] = False,
) -> None:
    """Time the attention back ends for a model, so that --attention auto takes the fastest.

    The times are kept in ~/.cache/rose/attention.json, for this device and all
    models with the same attention heads. For example:

    [bold]rose bench attention ./Qwen3-0.6B[/bold]
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from rose.kernels.attention import table
    from rose.models.loader import load
    from rose.runtime.attention_bench import measure
    from rose.runtime.build import PAGE_SIZE, choose_device

    loaded = load(model, dtype=dtype, device=choose_device(device))
    specs = loaded.backbone.attention_specs
    with torch.inference_mode():
        measured = measure(specs, loaded.dtype, loaded.device, PAGE_SIZE)
    shown = Table("batch", "heads", "head size", "back end", "ms a layer")
    for shape, times in measured.items():
        kind = "over KV pages" if shape.paged else "without a KV cache"
        for name, milliseconds in sorted(times.items(), key=lambda entry: entry[1]):
            heads = f"{shape.heads}/{shape.kv_heads}"
            shown.add_row(kind, heads, str(shape.head_dim), name, f"{milliseconds:.3f}")
    Console().print(shown)
    if not dry_run:
        table.write(measured)
        typer.echo(f"written to {table.path()}")
