"""A tokenizer that knows more tokens than the model: what has no row is never looked up."""

import pytest

from rose import Engine
from rose.runtime.errors import RequestError
from rose.serving.gateway.errors import ApiError
from tests import tiny
from tests.unit.gateway_stub import Http, StubClient, card, error_of
from tests.unit.generation_stub import StubLLM, byte_tokenizer, http_of

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


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("kite", "input"),
        (["a", "a kite"], "input[1]"),
        ([5, 7], "input[1]"),
        ([[5], [5, 7]], "input[1][1]"),
    ],
)
def test_the_server_names_the_text(value, param):
    http = Http({"stub": StubClient(card(vocab_size=7))})
    assert error_of(http.embed(input=value))["param"] == param
    assert http.embed(input="a red").status_code == 200


def test_the_server_names_the_chunk_s_document():
    http = Http({"stub": StubClient(card(vocab_size=7))})
    body = {"input": [["a", "red"], ["a", "kite"]]}
    assert error_of(http.post("/v1/contextualizedembeddings", body))["param"] == "input[1]"


def test_the_server_names_the_prompt():
    backend = byte_tokenizer()
    http = http_of(StubLLM([1], backend, vocab_size=backend.token_to_id("<tool_call>")))
    body = {"prompt": ["a", "<tool_call>"]}
    assert error_of(http.post("/v1/completions", body))["param"] == "prompt[1]"
