"""What people pass to `rose.Engine`: taken as it is meant, or refused before anything is computed."""

import numpy as np
import pytest

from rose.models.card import EmbeddingCard
from rose.runtime.errors import RequestError
from rose.runtime.options import EmbedOptions
from rose.serving.local_inputs import as_list, checked_output, plain_text

FACTS = EmbeddingCard(dimensions=8, hidden_size=8, normalize=True, pooling="mean")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("red", ["red"]),
        ([], []),
        (("red", "kite"), ["red", "kite"]),
        ([5, 6], [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (np.array(["red", "kite"]), ["red", "kite"]),
        pytest.param((text for text in ["red", "kite"]), ["red", "kite"], id="a generator"),
    ],
    ids=str,
)
def test_what_is_meant(given, meant):
    found = [plain_text("input", item) for item in as_list(given)]
    assert found == meant
    assert all(type(item) in (str, list) for item in found)
    assert all(type(token) is int for item in found if type(item) is list for token in item)


@pytest.mark.parametrize("given", [b"red", {"text": "red"}, {"red"}, 5, None], ids=str)
def test_what_are_no_texts(given):
    with pytest.raises(RequestError, match="texts or token ids are expected, not"):
        as_list(given)


@pytest.mark.parametrize(
    "item", [["5"], [1.5], [True], np.array([5.7]), [[5]], b"red", None, 5.0, ["red"]], ids=str
)
def test_what_is_neither_text_nor_ids(item):
    with pytest.raises(RequestError, match="is neither text nor token ids") as refused:
        plain_text("input[3]", item)
    assert refused.value.field == "input[3]"


@pytest.mark.parametrize("dimensions", [0, -1, 9])
def test_a_width_that_is_not_possible_costs_no_work(dimensions):
    with pytest.raises(RequestError, match="dimensions: must be from 1 to 8") as refused:
        checked_output(EmbedOptions(dimensions=dimensions), FACTS)
    assert refused.value.field == "dimensions"
    assert checked_output(EmbedOptions(dimensions=8), FACTS).dimensions == 8
