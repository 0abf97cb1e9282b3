"""Connections that break the rules of HTTP, or are slow or large where no body is."""

import json
import socket

import pytest

from rose.serving.gateway import http_protocol
from tests.unit.gateway_stub import StubClient
from tests.unit.test_gateway_live import Live, post, wait_until

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def live():
    with Live(StubClient()) as server:
        yield server


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_LIMIT_S", 0.3)


def read_all(connection):
    """All that comes until the server closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def statuses(received):
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def refusal(connection, status):
    received = read_all(connection)
    assert statuses(received) == [status], received
    head, body = received.split(b"\r\n\r\n", 1)
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"BREW /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_what_is_not_http_is_an_error_of_the_api(live, raw):
    with live.send(raw) as connection:
        refusal(connection, 400)
    wait_until(lambda: live.idle)


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["whole", "open"])
@pytest.mark.parametrize(
    "headers",
    [
        b"x: " + b"a" * 70_000,
        b"x" * 70_000 + b": a",
        b"\r\n".join(b"x%d: %b" % (i, b"a" * 1000) for i in range(100)),
        b"\r\n".join(b"x%d: a" % i for i in range(300)),
    ],
    ids=["value", "name", "sum", "count"],
)
def test_large_heads(live, headers, end):
    if end == b"" and headers.count(b":") == 1:  # the parser never gets to see the end
        headers += b"a" * 500_000
    with live.send(HEAD) as connection:
        connection.sendall(headers + end)
        assert refusal(connection, 431)["code"] == "headers_too_large"


def test_a_long_path(live):
    with live.send(b"GET /" + b"a" * 600_000) as connection:
        assert statuses(connection.recv(65536)) == [431]


def test_heads_within_the_limits_and_large_bodies_pass(live):
    headers = b"".join(b"x%d: %b\r\n" % (i, b"a" * 200) for i in range(240))
    large = post(b'{"input":"a","user":"' + b"b" * 1_000_000 + b'"}')
    close = b"Connection: close\r\n\r\n"
    with live.send(HEAD + headers + b"\r\n" + large + HEAD + close) as connection:
        assert statuses(read_all(connection)) == [200, 200, 200]


@pytest.mark.parametrize("before", [b"", HEAD + b"\r\n"], ids=["first", "second"])
def test_a_head_that_does_not_end_is_given_up(live, hasty, before):
    with live.send(before + HEAD) as connection:
        received = read_all(connection)
    assert statuses(received) == [200] * bool(before) + [408]


@pytest.mark.parametrize("raw", [b"", b"\r\n", HEAD + b"\r\n" + b"\r\n"])
def test_a_connection_without_a_head_is_closed(live, hasty, raw):
    with live.send(raw) as connection:
        received = read_all(connection)
    assert statuses(received) == [200] * raw.count(b"GET")


def test_a_head_may_wait_for_the_answer_before(live, hasty):
    live.client.delay_s = 0.8
    try:
        with live.send(post(b'{"input":"a"}') + HEAD) as connection:
            first = connection.recv(65536)
            connection.sendall(b"Connection: close\r\n\r\n")
            assert statuses(first + read_all(connection)) == [200, 200]
    finally:
        live.client.delay_s = 0


def test_a_slow_body_is_no_slow_head(live, hasty):
    body = b'{"input":"a"}'
    with live.send(post(b"", length=len(body))) as connection:
        connection.settimeout(0.6)
        with pytest.raises(socket.timeout):
            connection.recv(1)
        connection.settimeout(10)
        connection.sendall(body)
        assert statuses(connection.recv(65536)) == [200]
