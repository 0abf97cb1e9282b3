"""POST /v1/contextualizedembeddings, up to the engine: tokens, spans, limits, answers."""

import base64

import numpy as np
import pytest
from tokenizers import Tokenizer

from rose.serving.client_api import EngineError
from tests.unit.gateway_stub import Http, StubClient, card, error_of, tokenizer_json, vector

PATH = "/v1/contextualizedembeddings"
CLS, SEP = 2, 3


def serve(model=None, **settings):
    client = StubClient(model)
    http = Http({"stub": client}, **settings)
    http.client = client
    return http


def words(*texts):
    """Ids of texts without special tokens."""
    backend = Tokenizer.from_buffer(tokenizer_json())
    backend.no_truncation()
    backend.no_padding()
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def vectors_of(response):
    assert response.status_code == 200, response.text
    return [
        [item["embedding"] for item in document["data"]] for document in response.json()["data"]
    ]


def test_chunks_go_together_and_each_has_its_own_tokens():
    http = serve()
    documents = [["a red kite", "over the hill"], ["fine text"]]
    response = http.post(PATH, {"input": documents})
    (call,) = http.client.calls
    kite, hill, fine = words("a red kite", "over the hill", "fine text")
    assert [row.tolist() for row in call["ids"]] == [[CLS, *kite, *hill, SEP], [CLS, *fine, SEP]]
    assert [pairs.tolist() for pairs in call["spans"]] == [[[1, 4], [4, 7]], [[1, 3]]]
    body = response.json()
    assert body["object"] == "list"
    assert [document["index"] for document in body["data"]] == [0, 1]
    assert [item["index"] for item in body["data"][0]["data"]] == [0, 1]
    assert {item["object"] for document in body["data"] for item in document["data"]} == {
        "embedding"
    }
    assert body["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    expected = [[vector(kite, 16), vector(hill, 16)], [vector(fine, 16)]]
    for found, wanted in zip(vectors_of(response), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_separator_stands_between_chunks_where_the_model_was_trained_so():
    http = serve(card(embedding={"chunk_separator": 1}))
    assert http.post(PATH, {"input": [["a", "red", "kite"]]}).status_code == 200
    (call,) = http.client.calls
    a, red, kite = (row[0] for row in words("a", "red", "kite"))
    assert call["ids"][0].tolist() == [CLS, a, 1, red, 1, kite, SEP]
    assert call["spans"][0].tolist() == [[0, 2], [3, 4], [5, 7]]  # all between two separators


def test_a_suffix_that_is_the_separator_is_of_no_chunk():
    http = serve(card(embedding={"chunk_separator": SEP}))
    assert http.post(PATH, {"input": [["a", "red [SEP] kite"]]}).status_code == 200
    (call,) = http.client.calls
    assert call["ids"][0].tolist()[-1] == SEP
    assert call["spans"][0].tolist() == [[0, 2], [3, 6]]  # one in a text divides nothing


def test_a_prompt_goes_before_the_document_and_is_not_pooled():
    http = serve(card(embedding={"prompts": {"document": "document : "}}))
    assert (
        http.post(PATH, {"input": [["kite", "hill"]], "input_type": "document"}).status_code == 200
    )
    (call,) = http.client.calls
    (ids,) = words("document : kite hill")
    assert call["ids"][0].tolist() == [CLS, *ids, SEP]
    assert call["spans"][0].tolist() == [[3, 4], [4, 5]]


def test_a_prompt_that_merges_with_the_text_leaves_it_whole():
    http = serve(card(embedding={"prompts": {"document": "un"}}))
    assert http.post(PATH, {"input": [["ing", "a"]], "prompt_name": "document"}).status_code == 200
    (ids,) = words("uning")
    assert http.client.calls[0]["ids"][0].tolist() == [CLS, *ids, *words("a")[0], SEP]
    assert http.client.calls[0]["spans"][0].tolist() == [[2, 3], [3, 4]]  # un|##ing
    http.post(PATH, {"input": [["te"]], "prompt": "red ki"})
    assert http.client.calls[1]["ids"][0].tolist() == [CLS, *words("red kite")[0], SEP]
    assert http.client.calls[1]["spans"][0].tolist() == [[2, 3]]  # "kite" is one token


def test_options_reach_the_engine_and_numbers_come_back_as_asked():
    http = serve()
    fields = {"dimensions": 4, "encoding_format": "base64_int8", "normalize": False}
    response = http.post(PATH, {"input": [["a", "red"]], "priority": "bulk", **fields})
    (call,) = http.client.calls
    options = call["options"]
    assert (options.dimensions, options.normalize, options.output_dtype) == (4, False, "int8")
    assert call["priority"] == "bulk"
    ((first, _),) = vectors_of(response)
    (a,) = words("a")
    expected = (vector(a, 16)[:4] * 100).astype(np.int8)
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(first), np.int8), expected)


def test_too_long_is_refused_with_its_limit_and_place():
    http = serve()
    long = ["fine text"], ["kite " * 20, "hill " * 20]
    error = error_of(http.post(PATH, {"input": list(long)}))
    assert error["param"] == "input[1]"
    assert "42 tokens" in error["message"]
    assert "32" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert http.client.calls == []


@pytest.mark.parametrize("how", [{"truncate": True}, {"truncate_prompt_tokens": -1}])
def test_the_last_chunk_is_cut_if_asked(how):
    http = serve()
    response = http.post(PATH, {"input": [["kite " * 20, "hill " * 20]], **how})
    (call,) = http.client.calls
    kite, hill = (row[0] for row in words("kite", "hill"))
    assert call["ids"][0].tolist() == [CLS, *[kite] * 20, *[hill] * 10, SEP]
    assert call["spans"][0].tolist() == [[1, 21], [21, 31]]
    usage = response.json()["usage"]
    assert usage == {"prompt_tokens": 32, "total_tokens": 32, "truncated_tokens": 10}


def test_a_cut_that_leaves_nothing_of_a_chunk_is_refused():
    http = serve()
    fields = {"input": [["kite " * 20, "hill " * 20, "text"]], "truncate": True}
    error = error_of(http.post(PATH, fields))
    assert error["param"] == "input[0][2]"
    assert "nothing of 'input[0][2]'" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": "a"}, "input"),
        ({"input": ["a", "b"]}, "input[0]"),
        ({"input": [["a"], []]}, "input[1]"),
        ({"input": [["a"], ["b", ""]]}, "input[1][1]"),
        ({"input": [["a", " "]]}, "input[0][1]"),
        ({"input": [["a", 1]]}, "input[0][1]"),
        ({"input": [["a"] * 9]}, "input"),
        ({"input": [["a"]], "dimensions": 17}, "dimensions"),
        ({"input": [["a"]], "dimensions": 0}, "dimensions"),
        ({"input": [["a"]], "prompt_name": "other"}, "prompt_name"),
        ({"input": [["a"]], "prompt_name": "x", "prompt": "y"}, "prompt_name"),
        ({"input": [["a"]], "truncate": True, "truncation_side": "left"}, "truncation_side"),
        ({"input": [["a"]], "truncate": "START"}, "truncate"),
        ({"input": [["a"]], "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        (
            {"input": [["a"]], "encoding_format": "base64_int8", "output_dtype": "ubinary"},
            "output_dtype",
        ),
        ({"input": [["a"]], "encoding_format": "hex"}, "encoding_format"),
    ],
    ids=str,
)
def test_mistakes_name_their_field(body, param):
    http = serve(max_inputs=8)
    error = error_of(http.post(PATH, body))
    assert error["param"] == param, error
    assert http.client.calls == []


def test_an_unknown_model_is_a_404():
    assert error_of(serve().post(PATH, {"input": [["a"]], "model": "no"}), 404)["param"] == "model"


@pytest.mark.parametrize("pooling", ["cls", "weightedmean", "mean+cls"])
def test_poolings_without_meaning_for_a_chunk_are_refused(pooling):
    http = serve(card(embedding={"pooling": pooling}))
    error = error_of(http.post(PATH, {"input": [["a"]]}))
    assert error["param"] == "model"
    assert "no meaning for a chunk" in error["message"]


def test_the_engine_s_errors_name_the_document():
    http = serve()
    http.client.failure = EngineError("non_finite", "the model computed NaN", "input[1]")
    assert error_of(http.post(PATH, {"input": [["a"], ["b"]]}), 500)["param"] == "input[1]"


def test_a_vector_that_is_not_finite_names_its_document():
    http = serve()
    http.client.spoil = 2
    error = error_of(http.post(PATH, {"input": [["a", "red"], ["kite"]]}), 500)
    assert error["param"] == "input[1]"


def test_metrics_count_its_tokens():
    http = serve()
    http.post(PATH, {"input": [["a", "red"], ["kite"]]})
    text = http.get("/metrics").text
    assert 'rose_prompt_tokens_total{model="stub"} 7.0' in text
    assert 'rose_requests_total{route="/v1/contextualizedembeddings",status="200"} 1.0' in text
