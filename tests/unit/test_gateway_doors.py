"""How a gateway is reached: over TLS, from pages of other origins, through several workers."""

import asyncio
import contextlib
import json
import socket
import ssl
import tempfile
import threading
from pathlib import Path

import httpx
import pytest

from rose.serving.gateway import server
from rose.serving.gateway.app import create_app
from rose.serving.gateway.models import ModelTable
from rose.serving.gateway.server import Door
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.workers import HEADER, Workers, merged
from rose.serving.process import listen_together
from tests.unit.gateway_stub import StubClient, error_of

TLS = (
    Path(__file__).parents[1] / "tls" / "cert.pem",
    Path(__file__).parents[1] / "tls" / "key.pem",
)


@contextlib.contextmanager
def running(*apps, tls=None, folder=None):
    """Gateways that share a port, each in a loop of its own; yields the port."""
    with contextlib.ExitStack() as stack:
        listeners = listen_together("127.0.0.1", 0, len(apps))
        for number, (make, listener) in enumerate(zip(apps, listeners, strict=True)):
            workers = Workers(folder, len(apps), number, tls is not None) if folder else None
            own = stack.enter_context(workers.listen()) if workers else None
            taken = stack.enter_context(listener)
            door = Door(listener=taken, tls=tls, workers=workers, from_workers=own)
            stack.enter_context(_thread(make(workers), door))
        yield listeners[0].getsockname()[1]


@contextlib.contextmanager
def _thread(app, door):
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(
        target=loop.run_until_complete, args=(server._serve_http(app, door, stop),)
    )
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


def plain(settings=None, client=None):
    return lambda workers: create_app({"stub": client or StubClient()}, settings, workers)


# TLS


@pytest.fixture
def https():
    with running(plain(), tls=TLS) as port:
        yield port


def test_requests_over_tls(https):
    trust = ssl.create_default_context(cafile=TLS[0])
    with httpx.Client(base_url=f"https://localhost:{https}", verify=trust) as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/embeddings", json={"input": "a"})
        assert (answer.status_code, answer.json()["model"]) == (200, "stub")
        assert client.post("/v1/embeddings", content=b"{").status_code == 400


def test_who_does_not_know_the_certificate_does_not_talk(https):
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"https://localhost:{https}/health")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://localhost:{https}/health")


def test_nonsense_over_tls_is_answered_too(https):
    trust = ssl.create_default_context(cafile=TLS[0])
    with (
        socket.create_connection(("localhost", https)) as plain_socket,
        trust.wrap_socket(plain_socket, server_hostname="localhost") as connection,
    ):
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


# Origins

ORIGIN = "https://app.example"


def ask(settings, method, path, **options):
    async def send():
        app = create_app({"stub": StubClient()}, settings)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def test_pages_of_an_origin_that_is_let_in_may_ask_and_read_errors():
    settings = GatewaySettings(cors_origins=(ORIGIN,), api_keys=("k",))
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    answer = ask(settings, "OPTIONS", "/v1/embeddings", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in answer.headers["access-control-allow-headers"]
    sent = {"json": {"input": "a"}, "headers": {"Origin": ORIGIN}}
    refused = ask(settings, "POST", "/v1/embeddings", **sent)
    assert error_of(refused, 401)["code"] == "invalid_api_key"
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    sent["headers"]["Authorization"] = "Bearer k"
    answer = ask(settings, "POST", "/v1/embeddings", **sent)
    assert answer.status_code == 200
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origins", [(), ("https://other.example",)])
def test_pages_of_other_origins_may_not(origins):
    settings = GatewaySettings(cors_origins=origins)
    sent = {"json": {"input": "a"}, "headers": {"Origin": ORIGIN}}
    answer = ask(settings, "POST", "/v1/embeddings", **sent)
    assert "access-control-allow-origin" not in answer.headers
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    assert ask(settings, "OPTIONS", "/v1/embeddings", headers=asked).status_code in (400, 405)


# Workers


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as path:  # of a short name, as socket files need it
        yield Path(path)


def metrics_of(text, name):
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name)]
    return {labels: float(value) for labels, value in lines}


@pytest.mark.parametrize("tls", [None, TLS], ids=["plain", "tls"])
def test_whoever_is_asked_answers_for_all(folder, tls):
    settings = GatewaySettings(api_keys=("k",))
    clients = [StubClient(), StubClient()]
    apps = [plain(settings, client) for client in clients]
    base = "http" if tls is None else "https"
    headers = {"Authorization": "Bearer k"}
    with running(*apps, tls=tls, folder=folder) as port:
        for _ in range(40):  # each on a connection of its own
            answer = httpx.post(
                f"{base}://127.0.0.1:{port}/v1/embeddings",
                json={"input": "a"},
                headers=headers,
                verify=False,
            )
            assert answer.status_code == 200
        with httpx.Client(
            base_url=f"{base}://127.0.0.1:{port}", headers=headers, verify=False
        ) as client:
            text = client.get("/metrics").text
            assert sum(len(client.calls) for client in clients) == 40
            answered = metrics_of(text, 'rose_requests_total{route="/v1/embeddings"')
            assert sum(answered.values()) == 40
            assert set(metrics_of(text, "rose_requests_in_flight")) == {
                f'rose_requests_in_flight{{worker="{number}"}}' for number in (0, 1)
            }
            assert metrics_of(text, "rose_engine_steps") == {
                'rose_engine_steps_total{model="stub"}': 7.0
            }
            assert client.get("/ready").status_code == 200
            alone = client.get("/metrics", headers={HEADER: "0"}).text
            assert "worker=" not in alone
            clients[0].ready, clients[0].unready_reason = False, "it burns"
            for _ in range(4):
                assert "it burns" in error_of(client.get("/ready"), 503)["message"]


def test_connections_are_spread_over_the_workers(folder):
    clients = [StubClient() for _ in range(3)]
    with running(*(plain(client=client) for client in clients), folder=folder) as port:
        connections = [httpx.Client(base_url=f"http://127.0.0.1:{port}") for _ in range(60)]
        for connection in connections:
            assert connection.post("/v1/embeddings", json={"input": "a"}).status_code == 200
            connection.close()
    assert min(len(client.calls) for client in clients) >= 3, "20 each is what to expect"


def test_workers_that_are_gone_or_silent_are_told_of(folder):
    workers = Workers(folder, 3, 1)
    silent = Workers(folder, 3, 2).listen()  # it takes connections and says nothing
    with silent:
        assert asyncio.run(workers.ask("/ready", {})) == {0: None, 2: None}
        app = create_app({"stub": StubClient()}, None, workers)

        async def send(path):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                return await http.get(path)

        message = error_of(asyncio.run(send("/ready")), 503)["message"]
        assert message == "Gateway worker 0 does not answer. Gateway worker 2 does not answer."
        assert 'worker="1"' in asyncio.run(send("/metrics")).text


def test_a_port_that_workers_share_is_nobody_elses():
    first = listen_together("127.0.0.1", 0, 2)
    port = first[0].getsockname()[1]
    for count in (1, 2):
        with pytest.raises(OSError, match="Address already in use"):
            listen_together("127.0.0.1", port, count)
    for listener in first:
        listener.close()


def test_counters_of_engines_are_those_that_the_longest_lived_worker_saw():
    text = (
        '# TYPE rose_engine_steps_total counter\nrose_engine_steps_total{{model="m"}} {}\n'
        '# TYPE rose_engine_ready gauge\nrose_engine_ready{{model="m"}} {}\n'
    )
    whole = merged({0: text.format(5, 1).encode(), 1: text.format(9, 0).encode()}, own=0).decode()
    assert metrics_of(whole, "rose_engine") == {
        'rose_engine_steps_total{model="m"}': 9.0,
        'rose_engine_ready{model="m"}': 1.0,
    }


def test_a_table_without_models_is_ready_only_when_its_engines_have_told_their_names():
    client = StubClient()
    client.ready, client.unready_reason = False, "connecting"
    table = ModelTable({})
    table.unnamed["ipc://a"] = client

    async def send(path, body=None):
        transport = httpx.ASGITransport(create_app(table))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.request("POST" if body else "GET", path, content=body)

    answer = asyncio.run(send("/ready"))
    assert "engine at ipc://a has not told" in error_of(answer, 503)["message"]
    for body in ({"input": "a"}, {"input": "a", "model": "stub"}):
        assert error_of(asyncio.run(send("/v1/embeddings", json.dumps(body))), 503)
    table.add("stub", client)
    del table.unnamed["ipc://a"]
    client.ready, client.unready_reason = True, None
    assert asyncio.run(send("/ready")).status_code == 200
