"""Texts that are too long for a model in this process lose the side that its tokenizer names."""

import numpy as np
import pytest

from rose import Engine
from tests import tiny

LONG = "red kite over the sea a green tea"


@pytest.mark.parametrize(
    ("side", "prompt", "kept"),
    [
        ("right", None, "red kite over the"),
        ("left", None, "sea a green tea"),
        ("left", "short text ", "short text green tea"),
    ],
)
def test_side(tmp_path, side, prompt, kept):
    folder = tiny.save_bert(tmp_path / "bert")
    tiny.edit_json(folder / "tokenizer_config.json", truncation_side=side)
    with Engine(folder, max_model_len=6) as engine:
        encoded = engine.encode(LONG, prompt=prompt, truncate=True)
        assert encoded.cut == [0]
        np.testing.assert_array_equal(encoded.ids[0], engine.tokenizer.encode([kept])[0])
