"""Vectors of a real model, from the real process tree, through stock clients."""

import asyncio
import base64
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from sentence_transformers import SentenceTransformer

pytestmark = pytest.mark.golden

TEXTS = [
    "a red kite over the hill",
    "Ein roter Drachen über dem Hügel",
    "山の上の赤い凧 🪁",
    "",
    "word " * 180,
    "naïve façade — “quotes” … and\ttabs\n",
]


@pytest.fixture(scope="module")
def reference(minilm):
    model = SentenceTransformer(str(minilm), device="cpu")
    return model.encode(TEXTS, normalize_embeddings=True)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


def cosines(a, b):
    return (np.asarray(a) * np.asarray(b)).sum(axis=1)


def test_the_stock_client_gets_the_reference_vectors(client, reference):
    answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    assert cosines([item.embedding for item in answer.data], reference).min() > 0.9999


def test_both_encodings_agree_and_an_unknown_one_is_refused(server):
    body = {"model": "all-MiniLM-L6-v2", "input": TEXTS[0]}

    def ask(**fields):
        return httpx.post(f"{server.url}/v1/embeddings", json={**body, **fields}, timeout=60)

    floats = ask().json()["data"][0]["embedding"]
    coded = ask(encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4") == pytest.approx(floats, abs=1e-7)
    assert ask(encoding_format="float").json()["data"][0]["embedding"] == floats
    refused = ask(encoding_format="hex")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "encoding_format"


def test_langchain_which_sends_token_ids(server, minilm, monkeypatch):
    import tiktoken
    from langchain_openai import OpenAIEmbeddings
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()

    class Encoding:
        """LangChain's tokenizer, with the model's vocabulary instead of one that it downloads."""

        def encode_ordinary(self, text):
            return tokenizer.encode(text, add_special_tokens=False).ids

        def encode(self, text, **_):
            return self.encode_ordinary(text)

    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda _: Encoding())
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: Encoding())
    embeddings = OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="none", model="all-MiniLM-L6-v2"
    )
    found = embeddings.embed_documents(["a red kite", "over the hill"])
    ids = [Encoding().encode_ordinary(text) for text in ("a red kite", "over the hill")]
    direct = httpx.post(
        f"{server.url}/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": ids}
    )
    expected = [item["embedding"] for item in direct.json()["data"]]
    assert cosines(found, expected) == pytest.approx([1, 1], abs=1e-6)
    assert direct.json()["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_a_vector_does_not_depend_on_its_neighbours(client):
    rng = np.random.default_rng(0)
    words = ["kite", "hill", "red", "over", "sea", "tea", "green", "of", "many", "words"]
    batch = [" ".join(rng.choice(words, rng.integers(1, 200))) for _ in range(63)]
    alone = client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS[0]).data[0].embedding
    for place in (0, 31, 63):
        texts = [*batch[:place], TEXTS[0], *batch[place:]]
        answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=texts)
        assert cosines([answer.data[place].embedding], [alone])[0] >= 0.99999


def test_concurrent_requests_with_different_widths_get_their_own(server):
    async def scenario():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            async def ask(dimensions):
                body = {"model": "all-MiniLM-L6-v2", "input": TEXTS[0], "dimensions": dimensions}
                return (await http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]

            return await asyncio.gather(*[ask(d) for d in (64, 128, None) * 8])

    full = None
    for vector, dimensions in zip(asyncio.run(scenario()), (64, 128, None) * 8, strict=True):
        assert len(vector) == (dimensions or 384)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        full = vector if dimensions is None else full
    cut = np.array(full[:64]) / np.linalg.norm(full[:64])
    assert asyncio.run(scenario())[0] == pytest.approx(cut, abs=1e-6)


def test_models_ready_and_docs(server):
    listed = {m["id"]: m for m in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert listed["all-MiniLM-L6-v2"]["task"] == "embed"
    assert listed["all-MiniLM-L6-v2"]["dimensions"] == 384
    assert listed["all-MiniLM-L6-v2"]["max_model_len"] == 256
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert "/v1/embeddings" in httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert "text/html" in httpx.get(f"{server.url}/docs").headers["content-type"]


def test_the_gateway_process_has_no_torch(server):
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in server.children()]
    with_torch = ["libtorch" in text for text in maps]
    assert sorted(with_torch) == [False, True, True], "two engines have torch, the gateway has not"
