"""An engine that needs no model: vectors are made from the token ids alone.

`python tests/unit/gateway_stub.py [tokenizer folder]` serves it on 127.0.0.1:8123.
"""

import asyncio
import hashlib
import sys
from pathlib import Path

import httpx
import numpy as np
import uvicorn
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from rose.models.card import EmbeddingCard, ModelCard, TokenizerCard
from rose.serving.client_api import EmbedAnswer, ScoreAnswer
from rose.serving.gateway.app import create_app
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.protocol import Stats

WORDS = "a red kite over the hill word fine text query document : , . ! 1 2 3 [ ] un ##s ##ing ##ed"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer_json(cls=True, specials=True):
    """A small WordPiece tokenizer, with truncation and padding baked in."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *WORDS.split()])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if specials:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        backend.add_special_tokens(SPECIAL)
    backend.enable_truncation(7)
    backend.enable_padding(length=7)
    return backend.to_str().encode()


def card(name="stub", **changes):
    embedding = {
        "dimensions": 16,
        "hidden_size": 16,
        "normalize": True,
        "pooling": "mean",
        "outputs": ("dense", "sparse"),
        **changes.pop("embedding", {}),
    }
    tokenizer = changes.pop("tokenizer", {})
    facts = {
        "name": name,
        "path": f"/models/{name}",
        "architecture": "BertModel",
        "dtype": "float32",
        "tasks": ("embed",),
        "vocab_size": 64,
        "max_model_len": 32,
        "fingerprint": f"{name}-1",
        "created": 1_700_000_000,
        "tokenizer": TokenizerCard(
            **{"special_tokens": {"cls_token": "[CLS]", "sep_token": "[SEP]"}, **tokenizer}
        ),
        "embedding": EmbeddingCard(**embedding),
    }
    if "embed" not in changes.get("tasks", ("embed",)) and not embedding.get("late"):
        facts["embedding"] = None
    return ModelCard(**{**facts, **changes})


def vector(ids, width):
    """A unit vector that depends on the ids and nothing else."""
    seed = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).digest()
    row = np.random.default_rng(list(seed)).standard_normal(width)
    return (row / np.linalg.norm(row)).astype(np.float32)


class StubClient:
    def __init__(self, model=None, source=None):
        self.card = card() if model is None else model
        self.tokenizer_json = tokenizer_json() if source is None else source
        self.ready, self.unready_reason, self.stats = True, None, Stats(steps=7)
        self.calls, self.running, self.cancelled = [], 0, 0
        self.failure = None  # raised instead of an answer
        self.delay_s = 0.0
        self.spoil = None  # index of the row that becomes NaN
        self.scorer = None  # raw scores of a text's ids; None: what its vector begins with

    async def embed(
        self,
        ids,
        options,
        *,
        pool_from=0,
        spans=None,
        outputs=("text",),
        queries=False,
        priority="online",
        timeout_s=None,
        trace="",
    ):
        self.calls.append(
            {
                "ids": ids,
                "options": options,
                "pool_from": pool_from,
                "spans": spans,
                "outputs": outputs,
                "queries": queries,
                "priority": priority,
                "timeout_s": timeout_s,
                "trace": trace,
            }
        )
        await self._work()
        first, *more = (self._rows(ids, options, spans, output) for output in outputs)
        return EmbedAnswer(first, 0.001, 0.002, tuple(more))

    def _rows(self, ids, options, spans, output):
        if output != "text":
            spans = [[(i, i + 1) for i in range(len(row))] for row in ids]
        if spans is not None:
            ids = [row[a:b] for row, bounds in zip(ids, spans, strict=True) for a, b in bounds]
        vectors = self._vectors(ids, options)
        return np.abs(vectors[:, :1]) if output == "token_weights" else vectors

    async def score(self, ids, segments=None, *, priority="online", timeout_s=None, trace=""):
        self.calls.append(
            {
                "ids": ids,
                "segments": segments,
                "priority": priority,
                "timeout_s": timeout_s,
                "trace": trace,
            }
        )
        await self._work()
        width = len(self.card.scoring.labels)
        rows = [self.scorer(row) if self.scorer else vector(row, width) for row in ids]
        scores = np.array(rows, np.float32).reshape(len(ids), width)
        if self.spoil is not None:
            scores[self.spoil, 0] = np.nan
        return ScoreAnswer(scores, 0.001, 0.002)

    async def _work(self):
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.failure is not None:
            raise self.failure

    def _vectors(self, ids, options):
        rows = np.stack([vector(row, self.card.embedding.dimensions) for row in ids])
        rows = rows[:, : options.dimensions]
        if options.normalize is not False:
            rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        if self.spoil is not None:
            rows[self.spoil, 0] = np.nan
        kind = options.output_dtype
        if kind in ("binary", "ubinary"):
            packed = np.packbits(rows > 0, axis=1)
            return packed if kind == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)
        if kind in ("int8", "uint8"):
            return (rows * 100 + (100 if kind == "uint8" else 0)).astype(kind)
        return rows.astype(kind)


class Http:
    """Sends requests straight into an application, without a socket."""

    def __init__(self, clients=None, **settings):
        self.client = StubClient()
        self.app = create_app(clients or {"stub": self.client}, GatewaySettings(**settings))

    def send(self, method, path, **request):
        return self.gather((method, path, request))[0]

    def gather(self, *requests):
        """Several requests at one time."""

        async def all_of_them():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://rose") as client:
                sent = (
                    client.request(method, path, **request) for method, path, request in requests
                )
                return await asyncio.gather(*sent)

        return asyncio.run(all_of_them())

    def get(self, path, **request):
        return self.send("GET", path, **request)

    def post(self, path, body=None, **request):
        """A body as it is, or a value that becomes JSON."""
        if isinstance(body, bytes):
            request["headers"] = {"Content-Type": "application/json", **request.get("headers", {})}
            return self.send("POST", path, content=body, **request)
        return self.send("POST", path, json=body, **request)

    def embed(self, **fields):
        return self.post("/v1/embeddings", fields)


def error_of(response, status=400):
    """The error object of an answer, after checking that it is one of OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def main():
    client = StubClient()
    if sys.argv[1:]:
        source = (Path(sys.argv[1]) / "tokenizer.json").read_bytes()
        size = Tokenizer.from_buffer(source).get_vocab_size()
        facts = card("stub", vocab_size=size, max_model_len=256, embedding={"dimensions": 384})
        client = StubClient(facts, source)
    app = create_app({"stub": client}, GatewaySettings(log_requests=True))
    uvicorn.run(app, host="127.0.0.1", port=8123, access_log=False, log_level="info")


if __name__ == "__main__":
    main()
