"""Groups of options that several commands take, declared once as the fields of a dataclass.

`spread` makes options of them: a command says `engine: EngineFlags`, the command line shows each
field, and the command gets the whole. `as_options` writes a group for a child process.
"""

import copy
import functools
import inspect
import ssl
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from rose.serving.commands.options import (
    Attention,
    Deterministic,
    Device,
    Dtype,
    KvCacheMemory,
    LogFormat,
    LogLevel,
    MaxBatchTokens,
    MaxGraphTokens,
    MaxModelLen,
    MaxNumSeqs,
    OtlpEndpoint,
    Quantization,
    RankByCosine,
    RequestTimeout,
    StrictDimensions,
    Tasks,
    Truncate,
    Warmup,
    parse_tasks,
    size,
)
from rose.serving.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rose.runtime.build import ModelOptions

_SETTINGS = GatewaySettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Each engine"""  # noqa: D415 - the title of its part of --help

    device: Device = "auto"
    dtype: Dtype = "auto"
    quantization: Quantization = None
    attention: Attention = "auto"
    max_model_len: MaxModelLen = None
    max_batch_tokens: MaxBatchTokens = None
    max_num_seqs: MaxNumSeqs = 32
    kv_cache_memory: KvCacheMemory = None
    max_graph_tokens: MaxGraphTokens = None
    warmup: Warmup = None
    task: Tasks = None
    deterministic: Deterministic = False

    def check(self) -> None:
        """Find what is wrong in itself, before anything starts.

        Raises:
            ValueError: an option that no model could have.
        """
        from rose.runtime.graphs import parse_warmup

        parse_tasks(self.task)
        parse_warmup(self.warmup)

    def model_options(self, path: str, name: str | None) -> "ModelOptions":
        """Return the options for a model.

        Raises:
            ValueError: an option that no model could have.
        """
        from rose.runtime.build import ModelOptions
        from rose.runtime.graphs import parse_warmup

        return ModelOptions(
            path=path,
            name=name,
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            attention=self.attention,
            max_model_len=self.max_model_len,
            max_batch_tokens=self.max_batch_tokens,
            max_num_seqs=self.max_num_seqs,
            kv_cache_memory=self.kv_cache_memory,
            max_graph_tokens=self.max_graph_tokens,
            warmup=parse_warmup(self.warmup),
            tasks=parse_tasks(self.task),
            deterministic=self.deterministic,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFlags:
    """The gateway"""  # noqa: D415 - the title of its part of --help

    truncate: Truncate = False
    strict_dimensions: StrictDimensions = False
    rank_by_cosine: RankByCosine = False
    request_timeout: RequestTimeout = 600.0
    max_body_size: Annotated[
        int,
        typer.Option(
            parser=size, metavar="SIZE", help="Largest request body.", show_default="32MiB"
        ),
    ] = _SETTINGS.max_body_bytes
    max_inputs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most texts of one request.")
    ] = _SETTINGS.max_inputs
    max_concurrent_requests: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Requests at one time; what is more gets 429."),
    ] = _SETTINGS.max_concurrent_requests
    tokenizer_threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Threads that parse, tokenise and encode.",
            show_default="2 to 8, as many as there are CPUs",
        ),
    ] = None
    public_metrics: Annotated[
        bool, typer.Option("--public-metrics", help="Let /metrics be read without a key.")
    ] = False
    public_docs: Annotated[
        bool, typer.Option("--public-docs", help="Let /docs be read without a key.")
    ] = False
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose pages may use the API, such as https://app.example; repeatable; "
            "* for all.",
            metavar="ORIGIN",
            show_default="none",
        ),
    ] = None
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Write a line for each request.")
    ] = False

    def settings(self, api_keys: tuple[str, ...]) -> GatewaySettings:
        """Return the gateway's settings."""
        return GatewaySettings(
            api_keys=api_keys,
            truncate=self.truncate,
            strict_dimensions=self.strict_dimensions,
            rank_by_cosine=self.rank_by_cosine,
            request_timeout_s=self.request_timeout,
            max_body_bytes=self.max_body_size,
            max_inputs=self.max_inputs,
            max_concurrent_requests=self.max_concurrent_requests,
            tokenizer_threads=self.tokenizer_threads or _SETTINGS.tokenizer_threads,
            public_metrics=self.public_metrics,
            public_docs=self.public_docs,
            cors_origins=tuple(self.cors_origin or ()),
            log_requests=self.log_requests,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFlags:
    """TLS"""  # noqa: D415 - the title of its part of --help

    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="Certificate, with its chain, in PEM form.", metavar="FILE", show_default="none"
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(
            help="Its private key, in PEM form.", metavar="FILE", show_default="plain HTTP"
        ),
    ] = None

    def files(self) -> tuple[Path, Path] | None:
        """Return certificate and key, which fit; None without TLS.

        Raises:
            ValueError: one of them is missing, cannot be read, or does not fit the other.
        """
        if self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise ValueError("--tls-cert and --tls-key go together")
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as error:  # what is no PEM is one too
            reason = error.strerror or error
            raise ValueError(
                f"--tls-cert {self.tls_cert}, --tls-key {self.tls_key}: {reason}"
            ) from None
        return self.tls_cert, self.tls_key


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFlags:
    """The log, and traces"""  # noqa: D415 - the title of its part of --help

    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    otlp_endpoint: OtlpEndpoint = None

    def set_up(self, process: str) -> None:
        """Let this process log, and trace, under a name."""
        from rose.serving import tracing
        from rose.serving.process import set_up_logging

        set_up_logging(self.log_level, process, self.log_format)
        tracing.set_up(self.otlp_endpoint, process)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take the fields of its dataclass parameters as options of their own."""
    signature = inspect.signature(command)
    groups = {p.name: p.annotation for p in signature.parameters.values() if _is_group(p)}

    @functools.wraps(command)
    def run(**values: Any) -> None:  # noqa: ANN401 - whatever the options hold
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    parameters = [one for parameter in signature.parameters.values() for one in _options(parameter)]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def as_arguments(*groups: "DataclassInstance") -> dict[str, Any]:
    """Return the fields of groups by their names."""
    return {field.name: getattr(group, field.name) for group in groups for field in fields(group)}


def as_options(*groups: "DataclassInstance") -> list[str]:
    """Write groups as command-line options; what is None or False is left out."""
    options: list[str] = []
    for group in groups:
        for field in fields(group):
            value = getattr(group, field.name)
            if value is None or value is False:
                continue
            for item in value if isinstance(value, list) else [value]:
                options.append(f"--{field.name.replace('_', '-')}")
                if item is not True:
                    options.append(str(item))
    return options


def _is_group(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if not _is_group(parameter):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    group = parameter.annotation
    for field in fields(group):
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_under(group.__doc__, field),
        )


def _under(title: str, field: "Field[Any]") -> object:
    """Return the annotation of an option that `--help` shows under a title."""
    kind, option = get_args(field.type)
    option = copy.copy(option)
    option.rich_help_panel = title
    return Annotated[kind, option]
