"""Every route but embeddings: errors, keys, limits, models, tokens, metrics, documentation."""

import asyncio
import gzip
import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
from starlette.routing import Route

from rose.serving.gateway.auth import Keys
from rose.serving.gateway.errors import ApiError
from rose.serving.gateway.metrics import CONTENT_TYPE
from rose.serving.gateway.models import ModelTable
from rose.serving.gateway.routes import OPERATIONS
from tests.unit.gateway_stub import Http, StubClient, card, error_of

# What needs another kind of model has tests of its own.
OF_EMBEDDERS = [op for op in OPERATIONS if op.tag not in ("Text generation", "Ranking")]


@pytest.fixture
def http():
    return Http()


# Errors of the router and of the body


def test_no_such_route(http):
    for path in ("/", "/v1", "/v1/nothing", "/v1/embeddings/", "/%00", "/v1/models/"):
        assert error_of(http.get(path), 404)["type"] == "invalid_request_error"


def test_wrong_method(http):
    response = http.get("/v1/embeddings")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(http.post("/health", {}), 405)
    error_of(http.send("DELETE", "/v1/models"), 405)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": ""},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br"},
    ],
)
def test_wrong_content_type(http, headers):
    error_of(http.post("/v1/embeddings", gzip.compress(b'{"input":"a"}'), headers=headers), 415)


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "application/json; charset=UTF-8",
        "Application/JSON",
        "application/vnd.x+json",
        None,
    ],
)
def test_right_content_type(http, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    assert (
        http.send("POST", "/embeddings", content=b'{"input":"a"}', headers=headers).status_code
        == 200
    )


async def chunks(*parts, pause_s=0.0):
    for part in parts:
        yield part
        await asyncio.sleep(pause_s)


def test_body_too_large():
    http = Http(max_body_bytes=1000)
    body = json.dumps({"input": "a" * 1000}).encode()
    assert error_of(http.post("/v1/embeddings", body), 413)["code"] == "body_too_large"
    error_of(
        http.send("POST", "/v1/embeddings", content=chunks(body[:600], body[600:], b"never read")),
        413,
    )
    assert (
        http.send("POST", "/v1/embeddings", content=chunks(b'{"input":', b'"a"}')).status_code
        == 200
    )


def test_body_too_slow():
    http = Http(body_timeout_s=0.05)
    error_of(http.send("POST", "/v1/embeddings", content=chunks(b"{", b"}", pause_s=1)))


@pytest.mark.parametrize("length", ["5", "500", "-1", "abc", "1e3", "9" * 30, "\u0662"])
def test_wrong_content_length(http, length):
    async def send():
        done = [{"type": "http.request", "body": b'{"input":"a"}', "more_body": False}]
        sent = []
        headers = [
            (b"content-length", length.encode("latin-1", "replace")),
            (b"content-type", b"application/json"),
        ]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/embeddings",
            "headers": headers,
            "query_string": b"",
        }

        async def receive():
            return done.pop() if done else await asyncio.Event().wait()

        async def collect(message):
            sent.append(message)

        await http.app(scope, receive, collect)
        return sent

    assert asyncio.run(send())[0]["status"] == 400


# Overload


def test_too_many_requests_at_one_time():
    http = Http(max_concurrent_requests=2)
    http.client.delay_s = 0.1
    answers = http.gather(*[("POST", "/v1/embeddings", {"json": {"input": "a"}})] * 5)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert error_of(refused, 429)["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert http.embed(input="a").status_code == 200
    gateway = http.app.state.gateway
    assert (gateway.requests_in_flight, gateway.bytes_in_flight) == (0, 0)


def test_too_much_input_at_one_time():
    http = Http(max_body_bytes_in_flight=300)
    http.client.delay_s = 0.1
    answers = http.gather(*[("POST", "/v1/embeddings", {"json": {"input": "a" * 200}})] * 2)
    assert sorted(answer.status_code for answer in answers) == [200, 429]
    assert http.embed(input="a" * 1000).status_code == 200  # alone, any body may pass


def test_what_is_announced_takes_no_memory_before_it_comes():
    http = Http(max_body_bytes_in_flight=100)
    idle = chunks(b"{", b"}", pause_s=0.3)
    large = {"content": idle, "headers": {"Content-Type": "application/json"}}
    announced = {**large, "content": chunks(b"{", b"}", pause_s=0.3)}
    announced["headers"] = {**large["headers"], "Content-Length": str(32 << 20)}
    small = {"json": {"input": "a"}}
    kinds = [large, announced, small, small]
    answers = http.gather(*[("POST", "/v1/embeddings", kind) for kind in kinds])
    assert [answer.status_code for answer in answers] == [400, 400, 200, 200]
    assert http.app.state.gateway.bytes_in_flight == 0


def test_many_small_bodies_in_chunks_are_served_at_one_time():
    http = Http(max_body_bytes_in_flight=24 * 13)
    http.client.delay_s = 0.1

    def request():
        headers = {"Content-Type": "application/json"}
        body = chunks(b'{"input"', b':"a"}')
        return ("POST", "/v1/embeddings", {"content": body, "headers": headers})

    answers = http.gather(*[request() for _ in range(24)])
    assert {answer.status_code for answer in answers} == {200}


# Request ids


def test_request_ids(http):
    assert http.get("/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    made = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    unfit = http.get("/health", headers={"X-Request-Id": "x" * 200}).headers["x-request-id"]
    assert unfit.startswith("req-")
    response = http.get("/nothing", headers={"X-Request-Id": "abc"})
    assert response.headers["x-request-id"] == "abc"


# Keys


def test_keys_guard_everything_but_health():
    http = Http(api_keys=("first", "zweiter-schlüssel"))
    for operation in OPERATIONS:
        response = http.send(operation.method, operation.path.replace("{model:path}", "stub"))
        if operation.path in ("/health", "/ready"):
            assert response.status_code == 200
        else:
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    error_of(http.get("/nothing"), 401)
    for wrong in (
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic first",
        "first",
        "Bearer first second",
        "Bearer firs",
    ):
        error_of(http.get("/v1/models", headers={"Authorization": wrong}), 401)
    for right in ("Bearer first", "bearer first", "Bearer  first ".strip()):
        assert http.get("/v1/models", headers={"Authorization": right}).status_code == 200


def test_keys_beyond_ascii():
    keys = Keys(["schlüssel"])
    assert keys.admit("Bearer " + "schlüssel".encode().decode("latin-1"))
    assert not keys.admit("Bearer " + b"\xff\xfe".decode("latin-1"))


def test_open_metrics_and_docs():
    http = Http(api_keys=("k",), public_metrics=True, public_docs=True)
    for path in ("/metrics", "/docs", "/openapi.json"):
        assert http.get(path).status_code == 200
    error_of(http.get("/v1/models"), 401)


# Models


def test_models():
    ready, starting, other = (
        StubClient(card("one")),
        StubClient(),
        StubClient(card("gen", tasks=("generate",))),
    )
    starting.card, starting.ready, starting.unready_reason = None, False, "loading weights"
    http = Http({"org/one": ready, "alias": ready, "late": starting, "gen": other})
    models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert list(models) == ["org/one", "alias", "late", "gen"]
    one = models["org/one"]
    assert (one["object"], one["task"], one["max_model_len"], one["dimensions"], one["ready"]) == (
        "model",
        "embed",
        32,
        16,
        True,
    )
    assert (models["late"]["ready"], models["late"]["task"]) == (False, None)
    assert http.get("/v1/models/org/one").json() == one
    assert error_of(http.get("/v1/models/org/two"), 404)["code"] == "model_not_found"

    assert http.embed(model="alias", input="a").json()["model"] == "alias"
    response = http.embed(model="late", input="a")
    assert "loading weights" in error_of(response, 503)["message"]
    assert "retry-after" in response.headers
    assert "generate" in error_of(http.embed(model="gen", input="a"))["message"]
    assert error_of(http.embed(model="none", input="a"), 404)["param"] == "model"
    assert error_of(http.embed(input="a"))["param"] == "model"  # `late` may be an embedder too


def test_the_only_embedder_needs_no_name():
    one = StubClient()
    http = Http({"a": one, "b": one, "gen": StubClient(card("gen", tasks=("generate",)))})
    assert http.embed(input="a").status_code == 200
    assert (
        error_of(Http({"a": StubClient(), "b": StubClient()}).embed(input="a"))["param"] == "model"
    )


def test_an_engine_that_comes_back_with_another_tokenizer(http):
    assert http.embed(input="A").status_code == 200
    first = http.client.calls[-1]["ids"][0].tolist()
    http.client.tokenizer_json = http.client.tokenizer_json.replace(b'"a":5', b'"a":40')
    http.embed(input="A")
    assert http.client.calls[-1]["ids"][0].tolist() == first  # the same model: not read again
    http.client.card = card(fingerprint="another")
    http.embed(input="A")
    assert http.client.calls[-1]["ids"][0].tolist() == [2, 40, 3]


def test_a_tokenizer_that_cannot_be_read():
    http = Http({"stub": StubClient(source=b"{}")})
    assert "tokenizer.json" in error_of(http.embed(input="a"), 500)["message"]


def test_readiness(http):
    assert http.get("/ready").json() == {"status": "ready", "models": ["stub"]}
    http.client.ready, http.client.unready_reason = False, "the engine was lost"
    assert "the engine was lost" in error_of(http.get("/ready"), 503)["message"]
    error_of(http.embed(input="a"), 503)
    assert http.get("/health").json()["status"] == "ok"
    assert http.get("/v1/models").json()["data"][0]["ready"] is False


# Tokens


def test_tokenize(http):
    expected = {"tokens": [2, 5, 6, 3], "count": 4, "max_model_len": 32}
    assert http.post("/tokenize", {"model": "stub", "prompt": "a red"}).json() == expected
    assert http.post("/tokenize", {"text": "a red"}).json() == expected
    bare = http.post(
        "/tokenize", {"prompt": "a red", "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert (bare["tokens"], bare["token_strs"]) == ([5, 6], ["a", "red"])
    assert http.post("/tokenize", {"prompt": "a " * 100}).json()["count"] == 102  # never cut
    assert error_of(http.post("/tokenize", {}))["param"] == "prompt"
    assert error_of(http.post("/tokenize", {"prompt": "a", "text": "a"}))["param"] == "text"
    assert error_of(http.post("/tokenize", {"prompt": ["a"]}))["param"] == "prompt"
    error_of(http.post("/tokenize", {"prompt": "a", "model": "x"}), 404)
    assert (
        error_of(Http(max_tokenize_chars=3).post("/tokenize", {"text": "a red"}))["param"] == "text"
    )


def test_detokenize(http):
    assert http.post("/detokenize", {"tokens": [2, 5, 6, 3]}).json() == {
        "prompt": "[CLS] a red [SEP]",
        "text": "[CLS] a red [SEP]",
    }
    assert (
        http.post("/detokenize", {"tokens": [2, 5, 3], "skip_special_tokens": True}).json()["text"]
        == "a"
    )
    assert http.post("/detokenize", {"tokens": []}).json()["text"] == ""
    for tokens, param in (
        ([64], "tokens[0]"),
        ([5, -1], "tokens[1]"),
        (["a"], "tokens[0]"),
        (None, "tokens"),
        ([True], "tokens[0]"),
    ):
        assert error_of(http.post("/detokenize", {"tokens": tokens}))["param"] == param
    few = Http(max_tokenize_chars=3)
    assert few.post("/detokenize", {"tokens": [5, 6, 7]}).status_code == 200
    assert error_of(few.post("/detokenize", {"tokens": [5] * 4}))["param"] == "tokens"


# Metrics and the log


def test_metrics(http):
    http.embed(input=["a", "red kite"])
    http.embed(input="red " * 40, truncate=True)
    http.embed(input=[])
    http.get("/nothing")
    response = http.get("/metrics")
    assert response.headers["content-type"] == CONTENT_TYPE
    lines = set(response.text.splitlines())
    for line in (
        'rose_requests_total{route="/v1/embeddings",status="200"} 2.0',
        'rose_requests_total{route="/v1/embeddings",status="400"} 1.0',
        'rose_requests_total{route="other",status="404"} 1.0',
        'rose_prompt_tokens_total{model="stub"} 39.0',
        'rose_truncated_tokens_total{model="stub"} 10.0',
        'rose_request_batch_size_bucket{le="2.0",model="stub"} 2.0',
        'rose_queue_seconds_count{model="stub"} 2.0',
        'rose_compute_seconds_sum{model="stub"} 0.004',
        'rose_tokenize_seconds_count{model="stub"} 2.0',
        'rose_model_ready{model="stub"} 1.0',
        'rose_engine_steps_total{model="stub"} 7.0',
        'rose_engine_kv_pages_used{model="stub"} 0.0',
        'rose_engine_preemptions_total{model="stub"} 0.0',
        "rose_requests_in_flight 1.0",
    ):
        assert line in lines
    assert 'route="/v1/embeddings"' not in Http().get("/metrics").text  # each app counts alone


def test_the_log_is_quiet_unless_asked(http, caplog):
    caplog.set_level("INFO")
    http.embed(input="a")
    assert not [record for record in caplog.records if record.name.startswith("rose")]
    Http(log_requests=True).embed(input="a", request_id="mine")
    assert re.search(r"id=mine method=POST route=/v1/embeddings status=200 ms=\d+\.\d", caplog.text)


# Documentation


def test_openapi_tells_every_route(http):
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    told = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    routes = [route for route in http.app.routes if isinstance(route, Route)]
    there = {
        (method, re.sub(":path", "", route.path))
        for route in routes
        for method in route.methods - {"HEAD"}
    }
    assert told == there


def test_openapi_is_whole(http):
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert refs <= set(schemas)
    fields = schemas["EmbeddingRequest"]["properties"]
    described = {"input", "dimensions", "encoding_format", "truncate", "prompt_name", "model"}
    assert all(fields[name]["description"] for name in described)
    assert (
        "required" not in schemas["EmbeddingRequest"] or not schemas["EmbeddingRequest"]["required"]
    )
    ids = [
        entry["operationId"] for methods in document["paths"].values() for entry in methods.values()
    ]
    assert len(set(ids)) == len(ids)
    assert "securitySchemes" not in document["components"]
    guarded = Http(api_keys=("k",), public_docs=True).get("/openapi.json").json()
    assert guarded["paths"]["/v1/embeddings"]["post"]["security"]
    assert "security" not in guarded["paths"]["/health"]["get"]


def test_answers_are_as_openapi_says(http):
    """Decodes real answers by the very structs that the document is made from."""
    bodies = {
        "/v1/embeddings": {"input": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
        "/v1/contextualizedembeddings": {"input": [["a", "red"], ["kite"]]},
        "/embed": {"inputs": "a"},
        "/embed_all": {"inputs": ["a", "red"]},
        "/embed_sparse": {"inputs": ["a", "red"]},
        "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["red"]}},
        "/decode": {"ids": [5]},
    }
    for operation in OF_EMBEDDERS:
        path = operation.path.replace("{model:path}", "stub")
        response = http.send(operation.method, path, json=bodies.get(path))
        assert response.status_code == 200, path
        if isinstance(operation.answer, str):
            assert response.headers["content-type"].startswith(operation.answer)
        else:
            msgspec.json.decode(response.content, type=operation.answer)


def test_examples_work(http):
    http.client.card = card(vocab_size=30_000)
    for operation in OF_EMBEDDERS:
        if operation.example:
            assert http.post(operation.path, operation.example).status_code == 200


def test_docs_are_one_page_that_needs_nothing_else(http):
    response = http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", response.text)
    assert "openapi.json" in response.text
    assert len(response.content) < 40_000


def test_schema_frozen():
    """Fields of a request are an interface: this list changes only on purpose."""
    fields = next(op for op in OPERATIONS if op.path == "/v1/embeddings").body.__struct_fields__
    assert set(fields) >= {
        "model", "input", "messages", "encoding_format", "output_dtype", "dimensions", "prompt_name", "prompt",
        "input_type", "truncate", "truncate_prompt_tokens", "truncation_side", "normalize", "add_special_tokens",
        "user", "priority", "request_id",
    }  # fmt: skip


def test_lifespan_ends_the_threads(http):
    async def run():
        async with http.app.router.lifespan_context(http.app):
            transport = httpx.ASGITransport(http.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://rose") as client:
                assert (await client.post("/embeddings", json={"input": "a"})).status_code == 200

    asyncio.run(run())
    with pytest.raises(RuntimeError):
        http.app.state.gateway.pool.submit(print)


# Tokenizers


def test_tokenizers_are_loaded_before_they_are_needed(monkeypatch):
    sound, broken = StubClient(), StubClient(card("broken"), source=b"{")
    late = StubClient(card("late"))
    late_card, late.card = late.card, None
    table = ModelTable({"sound": sound, "broken": broken, "late": late})
    monkeypatch.setattr("rose.serving.gateway.models.LOOK_S", 0.01)

    async def scenario():
        with ThreadPoolExecutor(1) as pool:
            loading = asyncio.create_task(table.keep_loaded(pool))
            await until(lambda: table.named("sound")._loaded)
            late.card = late_card
            await until(lambda: table.named("late")._loaded)
            loading.cancel()
            with pytest.raises(ApiError, match=r"tokenizer\.json"):
                await table.named("broken").tokenizer(pool)

    asyncio.run(asyncio.wait_for(scenario(), 30))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)
