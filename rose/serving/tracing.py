"""Traces of requests through gateway and engine, by OpenTelemetry (the extra `otel`).

Unless a process was told where to send them, nothing is recorded and nothing is imported. A trace
that a client began goes on here: the gateway reads `traceparent` and hands it on to the engine.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rose._version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

_tracer: "Tracer | None" = None


def set_up(endpoint: str | None, process: str) -> None:
    """Send the spans of this process to an OTLP collector (HTTP), such as http://localhost:4318.

    Raises:
        ValueError: the extra is not installed.
    """
    if endpoint is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        message = f"--otlp-endpoint needs OpenTelemetry: pip install 'rose-engine[otel]' ({error})"
        raise ValueError(message) from None
    # While a collector is away each try would be a line; what is given up still is one.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    names = {"service.name": "rose", "service.version": __version__, "rose.process": process}
    provider = TracerProvider(resource=Resource.create(names))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    use(provider)


def use(provider: "TracerProvider | None") -> None:
    """Record with `provider`; None stops recording."""
    global _tracer
    _tracer = provider.get_tracer("rose", __version__) if provider is not None else None


def is_on() -> bool:
    """Whether anything is recorded."""
    return _tracer is not None


@contextmanager
def request_span(name: str, traceparent: str | None) -> Iterator["Span | None"]:
    """Record a request while the block runs; what else is recorded meanwhile is a part of it.

    Args:
        name: To begin with.
        traceparent: The header of a client that has begun a trace.
    """
    if _tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind

    context = _context(traceparent) if traceparent else None
    with _tracer.start_as_current_span(name, context, SpanKind.SERVER) as span:
        yield span


def end_request(
    span: "Span | None", *, method: str, route: str, status: int, request_id: str
) -> None:
    """Note what became of a request."""
    if span is None:
        return
    from opentelemetry.trace import Status, StatusCode

    span.update_name(f"{method} {route}")
    span.set_attribute("http.request.method", method)
    span.set_attribute("http.route", route)
    span.set_attribute("rose.request_id", request_id)
    if status:
        span.set_attribute("http.response.status_code", status)
    if status >= 500 or not status:
        span.set_status(Status(StatusCode.ERROR, None if status else "disconnected"))


def traceparent() -> str:
    """What is being recorded here, for the process that goes on with it; "" if nothing is."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def record(
    name: str,
    seconds: float,
    *,
    ago: float = 0.0,
    parent: str | None = None,
    **attributes: int | str,
) -> None:
    """Record something that is over.

    Args:
        name: What it was.
        seconds: How long it took.
        ago: How many seconds ago it ended.
        parent: The traceparent of what it is a part of, without which nothing is recorded; None:
            what is being recorded here.
        attributes: More about it.
    """
    if _tracer is None or parent == "":
        return
    end = time.time_ns() - round(ago * 1e9)
    span = _tracer.start_span(
        name,
        _context(parent) if parent is not None else None,
        attributes={f"rose.{key}": value for key, value in attributes.items()},
        start_time=end - round(seconds * 1e9),
    )
    span.end(end)


def _context(traceparent: str) -> "Context":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
