"""Cutting, normalising and quantising vectors."""

import warnings

import numpy as np
import pytest
import torch
from sentence_transformers.util import quantize_embeddings

from rose.models.output import QUANTIZERS, finish
from rose.runtime.options import OUTPUT_DTYPES, EmbedOptions


@pytest.fixture
def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32) * 7


def test_every_output_dtype_of_the_api_is_there():
    assert set(QUANTIZERS) == set(OUTPUT_DTYPES)


def test_cut_comes_before_normalisation(vectors):
    out = finish(vectors, EmbedOptions(dimensions=8), normalize_default=True)
    wanted = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(out, wanted, atol=1e-7)
    np.testing.assert_allclose(np.linalg.norm(out, axis=1), 1, atol=1e-6)
    assert out.dtype == np.float32
    assert out.flags.c_contiguous


def test_requests_win_over_the_checkpoint(vectors):
    kept = finish(vectors, EmbedOptions(normalize=False), normalize_default=True)
    np.testing.assert_array_equal(kept, vectors)
    scaled = finish(vectors, EmbedOptions(normalize=True), normalize_default=False)
    np.testing.assert_allclose(np.linalg.norm(scaled, axis=1), 1, atol=1e-6)
    as_stated = finish(vectors, EmbedOptions(), normalize_default=False)
    np.testing.assert_array_equal(as_stated, vectors)


@pytest.mark.parametrize("dimensions", [0, -1, 41, 10**9])
def test_impossible_widths(vectors, dimensions):
    with pytest.raises(ValueError, match=r"dimensions.*40"):
        finish(vectors, EmbedOptions(dimensions=dimensions), normalize_default=True)


def test_unknown_dtype(vectors):
    with pytest.raises(ValueError, match=r"int3.*float32"):
        finish(vectors, FakeOptions("int3"), normalize_default=True)


class FakeOptions:
    dimensions = None
    normalize = None

    def __init__(self, output_dtype: str) -> None:
        self.output_dtype = output_dtype


def test_tensors_are_taken_and_left_as_they_are(vectors):
    tensor = torch.from_numpy(vectors.copy())
    out = finish(tensor, EmbedOptions(), normalize_default=True)
    assert torch.equal(tensor, torch.from_numpy(vectors))
    assert not np.shares_memory(out, tensor.numpy())


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
@pytest.mark.parametrize("width", [40, 16, 8])
def test_binary_codes_are_those_of_sentence_transformers(vectors, precision, width):
    out = finish(
        vectors, EmbedOptions(dimensions=width, output_dtype=precision), normalize_default=True
    )
    wanted = quantize_embeddings(vectors[:, :width], precision)
    np.testing.assert_array_equal(out, wanted)
    assert out.dtype == wanted.dtype


def test_binary_codes_of_odd_widths_pad_with_zeros():
    out = finish([[1.0, -1.0, 2.0]], EmbedOptions(output_dtype="ubinary"), normalize_default=True)
    assert out.tolist() == [[0b10100000]]
    signed = finish([[1.0, -1.0, 2.0]], EmbedOptions(output_dtype="binary"), normalize_default=True)
    assert signed.tolist() == [[0b10100000 - 128]]


def test_int8_keeps_the_direction(vectors):
    for normalize in (True, False):  # the code does not depend on the length
        options = EmbedOptions(output_dtype="int8", normalize=normalize)
        out = finish(vectors, options, normalize_default=True)
        assert out.dtype == np.int8
        assert (np.abs(out).max(axis=1) == 127).all()
        wanted = np.rint(127 * vectors / np.abs(vectors).max(axis=1, keepdims=True))
        assert np.abs(out - wanted).max() <= 1
        cosine = (
            (out * vectors).sum(1) / np.linalg.norm(out, axis=1) / np.linalg.norm(vectors, axis=1)
        )
        assert cosine.min() > 0.9999
    unsigned = finish(vectors, EmbedOptions(output_dtype="uint8"), normalize_default=True)
    assert unsigned.dtype == np.uint8
    signed = finish(vectors, EmbedOptions(output_dtype="int8"), normalize_default=True)
    np.testing.assert_array_equal(unsigned.astype(int), signed.astype(int) + 128)


EXTREMES = [
    [0.0] * 8,
    [1e-45] * 8,
    [3e38, -3e38] * 4,
    [1e-30, 0, 0, 0, 0, 0, 0, -1e-30],
    [-0.0] * 8,
    [1e30, 1, 0, 0, 0, 0, 0, 0],
]


@pytest.mark.parametrize("dtype", OUTPUT_DTYPES)
@pytest.mark.parametrize("normalize", [True, False])
def test_extreme_vectors_stay_finite(dtype, normalize):
    vectors = np.array(EXTREMES, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = finish(
            vectors, EmbedOptions(output_dtype=dtype, normalize=normalize), normalize_default=True
        )
    assert np.isfinite(out.astype(np.float64)).all()
    if dtype == "float32" and normalize:
        lengths = np.linalg.norm(out.astype(np.float64), axis=1)
        np.testing.assert_allclose(lengths, [0, 1, 1, 1, 0, 1], atol=1e-6)


def test_rows_do_not_depend_on_each_other(vectors):
    for dtype in OUTPUT_DTYPES:
        options = EmbedOptions(output_dtype=dtype, dimensions=24)
        together = finish(vectors, options, normalize_default=True)
        for row, one in enumerate(vectors):
            alone = finish(one[None], options, normalize_default=True)
            np.testing.assert_array_equal(alone[0], together[row])


def test_an_empty_batch():
    empty = np.zeros((0, 40), np.float32)
    for dtype in OUTPUT_DTYPES:
        out = finish(empty, EmbedOptions(output_dtype=dtype), normalize_default=True)
        assert out.shape[0] == 0
