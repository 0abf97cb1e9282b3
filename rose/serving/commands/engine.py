"""`rose engine`."""

from typing import Annotated

import typer

from rose.serving.commands.options import (
    Attention,
    Deterministic,
    Device,
    Dtype,
    KvCacheMemory,
    LogLevel,
    MaxBatchTokens,
    MaxGraphTokens,
    MaxModelLen,
    MaxNumSeqs,
    Model,
    Tasks,
    Warmup,
    parse_tasks,
)


def engine(
    model: Model,
    bind: Annotated[str, typer.Option(help="ipc://PATH or tcp://127.0.0.1:PORT.")],
    name: Annotated[
        str | None, typer.Option(help="Name for clients.", show_default="the folder's")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attention: Attention = "auto",
    max_model_len: MaxModelLen = None,
    max_batch_tokens: MaxBatchTokens = None,
    max_num_seqs: MaxNumSeqs = 32,
    kv_cache_memory: KvCacheMemory = None,
    max_graph_tokens: MaxGraphTokens = None,
    warmup: Warmup = None,
    task: Tasks = None,
    deterministic: Deterministic = False,
    log_level: LogLevel = "info",
) -> None:
    """Run one engine alone; a gateway connects to the address that it binds."""
    from rose.runtime.build import ModelOptions
    from rose.runtime.graphs import parse_warmup
    from rose.serving.engine import run_engine
    from rose.serving.process import die_with_parent, set_up_logging

    die_with_parent()
    set_up_logging(log_level, f"engine {name or model}")
    options = ModelOptions(
        path=model,
        name=name,
        device=device,
        dtype=dtype,
        attention=attention,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        kv_cache_memory=kv_cache_memory,
        max_graph_tokens=max_graph_tokens,
        warmup=parse_warmup(warmup),
        tasks=parse_tasks(task),
        deterministic=deterministic,
    )
    run_engine(options, bind)
