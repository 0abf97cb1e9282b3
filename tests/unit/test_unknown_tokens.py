"""A tokenizer that knows more tokens than the model: what has no row is never looked up."""

import pytest

from rose import Engine
from rose.runtime.errors import RequestError
from rose.serving.gateway.errors import ApiError
from tests import tiny

EXTRA = {"pad_token": "<new>"}  # becomes the id after the last row


def test_texts_to_embed(tmp_path):
    folder = tiny.save_bert(tmp_path / "bert")
    tiny.edit_json(folder / "tokenizer_config.json", **EXTRA)
    with Engine(folder) as engine:
        rows = engine.card.vocab_size
        assert engine.tokenizer.encode(["<new>"])[0].tolist() == [2, rows, 3]
        with pytest.raises(RequestError, match=rf"input\[1\]: token ids go from 0 to {rows - 1}"):
            engine.embed(["kite", "kite <new>"])
        assert engine.embed(["kite"]).shape == (1, 32)


def test_pairs_and_texts_to_score(tmp_path):
    folder = tiny.save_encoder(tmp_path / "one", "bert", head="classifier", num_labels=1)
    tiny.edit_json(folder / "tokenizer_config.json", **EXTRA)
    with Engine(folder) as engine, pytest.raises((RequestError, ApiError), match=r"documents\[1\]"):
        engine.rank("kite", ["sea", "sea <new>"])
    folder = tiny.save_encoder(tmp_path / "many", "bert", head="classifier", num_labels=3)
    tiny.edit_json(folder / "tokenizer_config.json", **EXTRA)
    with Engine(folder) as engine:
        for item in ("sea <new>", ("sea", "<new>")):
            with pytest.raises((RequestError, ApiError), match=r"texts\[1\]"):
                engine.classify(["kite", item])
