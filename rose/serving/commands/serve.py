"""`rose serve`."""

from typing import Annotated

import typer

from rose.serving.commands.options import (
    ApiKeys,
    Attention,
    Deterministic,
    Device,
    Dtype,
    Host,
    KvCacheMemory,
    LogLevel,
    MaxBatchTokens,
    MaxGraphTokens,
    MaxModelLen,
    MaxNumSeqs,
    Port,
    RequestTimeout,
    StrictDimensions,
    Tasks,
    Truncate,
    Warmup,
    as_options,
    parse_tasks,
)


def serve(
    models: Annotated[
        list[str],
        typer.Argument(help="Model folders; NAME=PATH sets the name.", metavar="MODEL..."),
    ],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
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
    replicas: Annotated[int, typer.Option(min=1, help="Engines per model.")] = 1,
    truncate: Truncate = False,
    strict_dimensions: StrictDimensions = False,
    request_timeout: RequestTimeout = 600.0,
    log_level: LogLevel = "info",
) -> None:
    """Serve models over HTTP: one engine per model and a gateway, as one process tree."""
    from rose.runtime.graphs import parse_warmup
    from rose.serving.children import ChildFailedError
    from rose.serving.process import set_up_logging
    from rose.serving.supervisor import Supervisor, parse_models

    parse_warmup(warmup)
    parse_tasks(task)  # wrong ones are said here, before anything starts
    set_up_logging(log_level, "serve")
    supervisor = Supervisor(
        parse_models(models),
        host=host,
        port=port,
        replicas=replicas,
        engine_options=as_options(
            device=device,
            dtype=dtype,
            attention=attention,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            kv_cache_memory=kv_cache_memory,
            max_graph_tokens=max_graph_tokens,
            warmup=warmup,
            task=task,
            deterministic=deterministic,
            log_level=log_level,
        ),
        gateway_options=as_options(
            truncate=truncate,
            strict_dimensions=strict_dimensions,
            request_timeout=request_timeout,
            log_level=log_level,
        ),
        secrets={"ROSE_API_KEY": " ".join(api_key or ())},
    )
    try:
        code = supervisor.run()
    except ChildFailedError as error:
        typer.echo(f"error: {error}", err=True)
        code = 1
    raise typer.Exit(code)
