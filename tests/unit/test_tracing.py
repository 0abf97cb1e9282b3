"""Spans of a request over gateway and engine, and nothing at all when nobody asked for them."""

import asyncio
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rose.runtime.options import EmbedOptions
from rose.serving import tracing
from rose.serving.engine import EngineServer, Work
from rose.serving.gateway.app import create_app
from rose.serving.protocol import TokensDelta
from tests.unit.engine_rig import ToyRuntime, connected, drive, engine, texts
from tests.unit.gateway_stub import StubClient

CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def exporter():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


def post(body, client=None, path="/v1/embeddings"):
    async def send():
        transport = httpx.ASGITransport(create_app({"stub": client or StubClient()}))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            await http.get("/health")
            return await http.post(path, json=body, headers={"traceparent": CLIENT})

    return asyncio.run(send())


def spans_of(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds_of(span):
    return (span.end_time - span.start_time) / 1e9


def test_the_gateway_goes_on_with_the_trace_of_its_client(exporter):
    answer = post({"input": "a"})
    spans = spans_of(exporter)
    assert set(spans) == {"POST /v1/embeddings", "tokenize"}, "and none of /health"
    request, part = spans["POST /v1/embeddings"], spans["tokenize"]
    assert f"{request.context.trace_id:032x}" == CLIENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == CLIENT.split("-")[2]
    assert part.parent.span_id == request.context.span_id
    assert part.attributes["rose.model"] == "stub"
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["rose.request_id"] == answer.headers["x-request-id"]
    assert request.start_time <= part.start_time <= part.end_time <= request.end_time


@pytest.mark.parametrize(
    ("fault", "status", "failed"), [(None, 400, False), (KeyError(), 500, True)]
)
def test_faults_of_the_server_are_marked_and_those_of_clients_are_not(
    exporter, fault, status, failed
):
    client = StubClient()
    client.failure = fault
    assert post({"input": "a" if fault else []}, client).status_code == status
    span = spans_of(exporter)["POST /v1/embeddings"]
    assert span.attributes["http.response.status_code"] == status
    assert span.status.is_ok is not failed


def test_the_engine_records_parts_of_what_the_gateway_asks(exporter, tmp_path):
    address = f"ipc://{tmp_path}/e.sock"

    async def scenario():
        async with engine(ToyRuntime(), address), connected(address) as client:
            await client.wait_ready()
            ids = [np.array([1, 2, 3], np.int32)]
            await client.embed(ids, EmbedOptions())  # traced by nobody
            with tracing.request_span("asked", CLIENT):
                await client.embed(ids, EmbedOptions())

    drive(scenario)
    spans = spans_of(exporter)
    assert [span.name for span in exporter.get_finished_spans()] == ["queue", "forward", "asked"]
    for name in ("queue", "forward"):
        assert spans[name].parent.span_id == spans["asked"].context.span_id
    assert spans["queue"].end_time == pytest.approx(spans["forward"].start_time, abs=5e6)
    assert spans["forward"].attributes["rose.texts"] == 1


def test_texts_are_counted_also_where_the_rows_are_those_of_tokens(exporter, tmp_path):
    address = f"ipc://{tmp_path}/e.sock"

    class TokenRuntime(ToyRuntime):
        def compute(self, batch):
            return torch.zeros(len(batch.ids), 3)

    async def scenario():
        async with engine(TokenRuntime(), address), connected(address) as client:
            await client.wait_ready()
            with tracing.request_span("asked", CLIENT):
                ids = texts([1, 2, 3], [4])
                answer = await client.embed(ids, EmbedOptions(), outputs=("hidden_states",))
            assert answer.vectors.shape == (4, 3)

    drive(scenario)
    assert spans_of(exporter)["forward"].attributes["rose.texts"] == 2


def test_a_span_that_is_over_has_its_times(exporter):
    before = time.time_ns()
    tracing.record("x", 2.0, ago=1.0, parent=CLIENT, texts=3)
    tracing.record("nothing", 2.0, parent="")
    (span,) = exporter.get_finished_spans()
    assert seconds_of(span) == pytest.approx(2.0)
    assert span.end_time == pytest.approx(before - 1e9, abs=5e8)


def test_without_a_collector_nothing_of_opentelemetry_is_imported():
    code = (
        "import sys\n"
        "from rose.serving import tracing\n"
        "from rose.serving.gateway import app\n"
        "tracing.set_up(None, 'gateway')\n"
        "tracing.record('x', 1.0)\n"
        "with tracing.request_span('x', None) as span:\n"
        "    assert span is None and tracing.traceparent() == ''\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_the_option_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"rose-engine\[otel\]"):
        tracing.set_up("http://127.0.0.1:4318", "gateway")


def test_generations_have_two_parts(exporter):
    """By the engine's own account, from arrival to the first tokens and from there on."""
    server = EngineServer.__new__(EngineServer)
    work = Work(lambda: None, "r", CLIENT)
    server._clients = {b"c": type("Client", (), {"requests": {1: work}})()}
    for finish in (None, None, "stop"):
        server._trace(b"c", TokensDelta(1, [5], finish))
    server._trace(b"gone", TokensDelta(1, [5], "stop"))
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["queue and prefill", "decode"]
