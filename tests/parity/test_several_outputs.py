"""`output_types`: dense, sparse and multi-vector of one pass, each as it is when asked for alone."""

import base64

import numpy as np
import pytest
import torch

from rose import Engine
from rose.runtime.build import ModelOptions, build
from rose.runtime.embedding import EmbedBatch
from rose.runtime.errors import RequestError
from rose.runtime.queue import EmbedJob, JobSlice
from tests.parity.served import post
from tests.parity.test_bge_m3 import TEXTS, reference, save_m3
from tests.parity.test_splade import save_sparse

ALL = ["dense", "sparse", "multi_vector"]
ROUTE = "/v1/embeddings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_m3(tmp_path_factory.mktemp("several") / "m3")


def expected_weights(folder, text):
    ids, _, weights, _ = reference(folder, text)
    found = {}
    for token, weight in zip(ids, weights[:, 0].tolist(), strict=True):
        if weight > 0 and token not in (0, 1, 2, 3):  # <s>, <pad>, </s>, <unk>
            found[token] = max(weight, found.get(token, 0.0))
    return found


def check_entry(folder, text, entry):
    _, dense, _, vectors = reference(folder, text)
    np.testing.assert_allclose(entry["embedding"], dense, atol=2e-5)
    np.testing.assert_allclose(entry["multi_vector_embedding"], vectors, atol=2e-5)
    found = {item["index"]: item["value"] for item in entry["sparse_embedding"]}
    assert found == pytest.approx(expected_weights(folder, text), abs=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_all_three_are_those_of_the_reference(folder, deterministic):
    body = {"input": TEXTS, "output_types": ALL}
    answers = post(folder, (ROUTE, body), (ROUTE, {"input": TEXTS}), deterministic=deterministic)
    several, plain = (answer.json() for answer in answers)
    assert several["usage"] == plain["usage"]
    for i, (text, entry) in enumerate(zip(TEXTS, several["data"], strict=True)):
        assert (entry["object"], entry["index"]) == ("embedding", i)
        check_entry(folder, text, entry)
    assert all(set(entry) == {"object", "index", "embedding"} for entry in plain["data"])


def test_what_is_not_asked_for_is_not_there(folder):
    asked = [["sparse"], ["multi_vector"], ["multi_vector", "dense"], ["dense", "dense"]]
    answers = post(folder, *((ROUTE, {"input": "red", "output_types": types}) for types in asked))
    names = {
        "dense": "embedding",
        "sparse": "sparse_embedding",
        "multi_vector": "multi_vector_embedding",
    }
    for types, answer in zip(asked, answers, strict=True):
        (entry,) = answer.json()["data"]
        assert set(entry) == {"object", "index"} | {names[kind] for kind in types}


def test_dense_vectors_are_finished_as_ever_and_others_are_left_alone(folder):
    body = {"input": TEXTS, "output_types": ALL, "dimensions": 8, "encoding_format": "base64"}
    (answer,) = post(folder, (ROUTE, body | {"output_dtype": "float16"}))
    for text, entry in zip(TEXTS, answer.json()["data"], strict=True):
        _, dense, _, vectors = reference(folder, text)
        dense = torch.nn.functional.normalize(dense[:8], dim=0)
        found = np.frombuffer(base64.b64decode(entry["embedding"]), "<f2")
        np.testing.assert_allclose(found, dense, atol=1e-3)
        rows = [base64.b64decode(row) for row in entry["multi_vector_embedding"]]
        found = [np.frombuffer(row, "<f4") for row in rows]
        np.testing.assert_allclose(found, vectors, atol=2e-5)


def test_one_pass_computes_them_all(folder, monkeypatch):
    served = build(ModelOptions(path=str(folder), device="cpu", max_batch_tokens=64))
    try:
        model = served.loaded.embedding
        calls = []
        forward = type(model.backbone).forward
        monkeypatch.setattr(
            type(model.backbone),
            "forward",
            lambda self, batch: calls.append(len(batch.input_ids)) or forward(self, batch),
        )
        ids, lengths = np.array([0, 5, 6, 2, 0, 7, 2], np.int32), np.array([4, 3], np.int32)
        outputs = ("text", "token_weights", "multi_vector", "hidden_states")
        job = EmbedJob(ids, lengths, outputs=outputs)
        batch = EmbedBatch.of_slices([JobSlice(job, 0, 2)])
        found = served.embedding.step_all(batch).result()
        assert calls == [7]
        assert [tuple(rows.shape) for rows in found] == [(2, 32), (7, 1), (7, 20), (7, 32)]
    finally:
        served.close()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"output_types": []}, "output_types", ["'dense', 'sparse', 'multi_vector'"]),
        ({"output_types": ["dens"]}, "output_types", ["'dens'", "'dense', 'sparse'"]),
        ({"output_types": "dense"}, "output_types", []),
        ({"output_types": [3]}, "output_types", []),
        ({"output_types": ["sparse"], "dimensions": 8}, "dimensions", ["dense"]),
        ({"output_types": ["sparse"], "normalize": False}, "normalize", ["dense"]),
        ({"output_types": ["multi_vector"], "output_dtype": "int8"}, "output_dtype", ["dense"]),
        (
            {"output_types": ["sparse"], "encoding_format": "base64_int8"},
            "encoding_format",
            ["dense"],
        ),
    ],
)
def test_wrong_types_are_named(folder, fields, param, words):
    (answer,) = post(folder, (ROUTE, {"input": "red", **fields}))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert all(word in error["message"] for word in words)


def test_a_model_with_one_kind_says_which(tmp_path):
    encoder = save_sparse(tmp_path / "model", "bert")
    bodies = [{"input": ["red kite", "a"], "output_types": types} for types in (["sparse"], ALL)]
    sparse, several = post(tmp_path / "model", *((ROUTE, body) for body in bodies))
    wanted = encoder.encode(["red kite", "a"], convert_to_sparse_tensor=False)
    for entry, row in zip(sparse.json()["data"], wanted, strict=True):
        assert set(entry) == {"object", "index", "sparse_embedding"}
        found = torch.zeros_like(row)
        for item in entry["sparse_embedding"]:
            found[item["index"]] = item["value"]
        torch.testing.assert_close(found, row, atol=2e-5, rtol=1e-4)
    error = several.json()["error"]
    assert (several.status_code, error["param"]) == (400, "output_types")
    assert "'dense'; 'tiny' has 'sparse'" in error["message"]


def test_in_this_process(folder):
    with Engine(folder, device="cpu", max_batch_tokens=16) as engine:
        seen = []
        found = engine.embed_types(TEXTS, ALL, progress=lambda done, of: seen.append((done, of)))
        assert seen[-1] == (3, 3)
        for i, text in enumerate(TEXTS):
            _, dense, _, vectors = reference(folder, text)
            np.testing.assert_allclose(found.dense[i], dense, atol=2e-5)
            np.testing.assert_allclose(found.multi_vector[i], vectors, atol=2e-5)
            weights = dict(zip(*(part.tolist() for part in found.sparse[i]), strict=True))
            assert weights == pytest.approx(expected_weights(folder, text), abs=2e-5)
        np.testing.assert_allclose(found.dense, engine.embed(TEXTS), atol=1e-6)
        only = engine.embed_types(TEXTS[0], ["sparse"])
        assert only.dense is None
        assert only.multi_vector is None
        assert len(only.sparse) == 1
        with pytest.raises(RequestError, match="'dense', 'sparse', 'multi_vector'") as failed:
            engine.embed_types("red", ["colbert"])
        assert failed.value.field == "output_types"
        none = engine.embed_types([], ALL, dimensions=8, output_dtype="binary")
        assert (none.dense.shape, none.dense.dtype) == ((0, 1), np.int8)
        assert none.sparse == none.multi_vector == []
        assert engine.embed_types([], ["sparse"]).dense is None
        with pytest.raises(RequestError, match="colbert"):
            engine.embed_types([], ["colbert"])
