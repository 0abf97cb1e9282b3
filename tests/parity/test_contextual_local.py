"""`Engine.embed_chunks`: what /v1/contextualizedembeddings answers, without a server."""

import numpy as np
import pytest
from sentence_transformers.sentence_transformer import modules as st

from rose import Engine
from rose.runtime.errors import RequestError
from tests import tiny
from tests.parity.served import post
from tests.parity.test_contextual import (
    DOCUMENTS,
    PATH,
    in_codes,
    save_pplx_context,
    save_st,
    vectors_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("chunks")
    core = tiny.save_bert(root / "core")
    return save_st(root / "model", core, st.Pooling(32, "mean"), st.Normalize())


@pytest.fixture(scope="module")
def engine(folder):
    with Engine(folder, device="cpu", max_batch_tokens=32) as engine:
        yield engine


@pytest.mark.parametrize(
    "options",
    [{}, {"prompt": "tea over "}, {"dimensions": 8, "normalize": False}],
    ids=["plain", "prompt", "cut"],
)
def test_chunks_equal_those_of_the_endpoint(folder, engine, options):
    seen = []
    found = engine.embed_chunks(
        DOCUMENTS, **options, progress=lambda done, of: seen.append((done, of))
    )
    (response,) = post(folder, (PATH, {"input": DOCUMENTS, **options}))
    assert [len(rows) for rows in found] == [3, 1, 4]
    for rows, wanted in zip(found, vectors_of(response), strict=True):
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, np.stack(wanted), atol=2e-6)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_chunk_depends_on_its_document_and_not_on_others(engine):
    (alone,) = engine.embed_chunks(DOCUMENTS[:1])
    together = engine.embed_chunks(DOCUMENTS)
    np.testing.assert_allclose(together[0], alone, atol=1e-6)
    (other,) = engine.embed_chunks([["red kite over sea", "words"]])
    assert np.abs(other[0] - alone[0]).max() > 1e-3
    (text,) = engine.embed_chunks([["short text"]])
    assert np.abs(text[0] - engine.embed("short text")[0]).max() > 1e-4, "without [CLS] and [SEP]"


def test_a_model_with_separators_and_codes_of_its_own(tmp_path):
    model, _ = save_pplx_context(tmp_path / "pplx", modules=True)
    request = {"input": DOCUMENTS, "encoding_format": "base64_int8"}
    (response,) = post(model, (PATH, request), max_model_len=100)
    with Engine(model, device="cpu", max_model_len=100) as engine:
        found = engine.embed_chunks(DOCUMENTS, output_dtype="int8")
    for rows, wanted in zip(found, in_codes(response, np.int8), strict=True):
        assert rows.dtype == np.int8
        assert np.abs(rows.astype(int) - wanted).max() <= 1


def test_documents_that_are_too_long(engine):
    long = ["red kite over sea"] * 3 + ["the sea " * 20]
    with pytest.raises(RequestError, match=r"input\[1\].*pass truncate=True") as caught:
        engine.embed_chunks([["a"], long])
    assert caught.value.field == "input[1]"
    (rows,) = engine.embed_chunks([long], truncate=True)
    assert rows.shape == (4, 32)
    with pytest.raises(RequestError, match=r"nothing of 'input\[0\]\[4\]' would be left"):
        engine.embed_chunks([[*long, "a"]], truncate=True)


def test_what_cannot_be_embedded_is_named(engine, tmp_path):
    assert engine.embed_chunks([]) == []
    for documents, place in (
        (["a text"], "input[0]"),
        ([["a"], []], "input[1]"),
        ([["a", ""]], "input[0][1]"),
        ([["a", 3]], "input[0][1]"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.embed_chunks(documents)
        assert caught.value.field == place
    with pytest.raises(RequestError, match="prompt_name"):
        engine.embed_chunks([["a"]], prompt_name="none")
    with pytest.raises(RequestError, match="dimensions"):
        engine.embed_chunks([["a"]], dimensions=64)
    core = tiny.save_bert(tmp_path / "core")
    model = save_st(tmp_path / "cls", core, st.Pooling(32, "cls"))
    with (
        Engine(model, device="cpu", max_batch_tokens=32) as other,
        pytest.raises(RequestError, match="pooling 'cls' has no meaning"),
    ):
        other.embed_chunks([["a"]])


def test_a_model_without_vectors_says_so(tmp_path):
    folder = tiny.save_decoder(tmp_path, "llama")
    with (
        Engine(folder, device="cpu", tasks=["generate"]) as engine,
        pytest.raises(RequestError, match="has no vectors of texts"),
    ):
        engine.embed_chunks([["a"]])
