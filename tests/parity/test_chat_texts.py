"""Embedders whose texts pass through a chat template, against sentence-transformers."""

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st

from rose.models.errors import CheckpointError
from rose.models.loader import load
from rose.runtime.errors import RequestError
from rose.serving.gateway.chat_texts import render_pair, render_text
from rose.serving.gateway.embedding_input import prepare
from rose.serving.gateway.errors import ApiError
from rose.serving.gateway.schemas import EmbeddingRequest
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local import Engine
from tests import tiny

FLAT = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '.' }}{% endfor %}"
    "{{ 'answer' if add_generation_prompt }}{{ ending | default('') }}!?"
)
PARTS = FLAT.replace("m.content", "m.content[0].text")
TEXTS = ["kite", "a much longer text with many more words in it", "A b C"]


def save(path: Path, template: str, **processing: object) -> SentenceTransformer:
    """Write an embedder as sentence-transformers does, and return the reference."""
    tiny.save_decoder(path / "core", "qwen3", head=False, vocab_size=80)
    tokenizer = tiny.decoder_tokenizer()
    tokenizer.add_tokens(["<", ">", "!"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path / "core")
    core = st.Transformer(
        str(path / "core"),
        processing_kwargs={"chat_template": processing} if processing else None,
        model_kwargs={"attn_implementation": "eager"},
    )
    model = SentenceTransformer(
        modules=[core, st.Pooling(32, "lasttoken")],
        device="cpu",
        prompts={"query": "find", "document": ""},
    )
    model.save_pretrained(str(path / "model"), create_model_card=False)
    return model


@pytest.mark.parametrize("template", [FLAT, PARTS], ids=["flat", "parts"])
@pytest.mark.parametrize(
    "processing", [{}, {"add_generation_prompt": True, "ending": " yes"}], ids=str
)
def test_vectors_are_those_of_sentence_transformers(tmp_path, template, processing):
    reference = save(tmp_path, template, **processing)
    with Engine(tmp_path / "model", device="cpu", dtype="float32", max_batch_tokens=512) as engine:
        chat = engine.card.embedding.chat
        assert (chat.parts, chat.variables) == (template is PARTS, processing)
        assert engine.card.embedding.pools_prompt
        for name in (None, "query", "document"):
            wanted = reference.encode(TEXTS, prompt_name=name)
            found = engine.embed(TEXTS, prompt_name=name)
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        ids = [[5, 6, 7]]
        np.testing.assert_array_equal(engine.embed(ids), engine.embed([*ids, "kite"])[:1])


def test_a_cut_keeps_the_end_of_the_template(tmp_path):
    save(tmp_path, FLAT, add_generation_prompt=True)
    path = tmp_path / "model"
    tiny.edit_json(path / "tokenizer_config.json", model_max_length=30)
    reference = SentenceTransformer(
        str(path), device="cpu", model_kwargs={"attn_implementation": "eager"}
    )
    with Engine(path, device="cpu", dtype="float32", max_batch_tokens=512) as engine:
        found = engine.embed(TEXTS, truncate=True)
        np.testing.assert_allclose(found, reference.encode(TEXTS), atol=1e-5)
        with pytest.raises(RequestError, match="the limit is 30"):
            engine.embed(TEXTS)


class Gateway:
    """Prepares requests for a model."""

    def __init__(self, path: Path) -> None:
        loaded = load(path)
        self.card = loaded.card
        self.tokenizer = Tokenizer.from_card(loaded.card, loaded.tokenizer_json)

    def ids(self, **fields: object) -> list[list[int]]:
        body = EmbeddingRequest(**fields)
        prepared = prepare(body, self.card, self.tokenizer, GatewaySettings())
        assert prepared.pool_from == 0
        return [row.tolist() for row in prepared.ids]


def expected_ids(reference: SentenceTransformer, **options: object) -> list[list[int]]:
    features = reference.preprocess(TEXTS, **options)
    pairs = zip(features["input_ids"], features["attention_mask"], strict=True)
    return [row[mask.bool()].tolist() for row, mask in pairs]


@pytest.mark.parametrize("template", [FLAT, PARTS], ids=["flat", "parts"])
def test_the_gateway_feeds_the_same_tokens(tmp_path, template):
    reference = save(tmp_path, template)
    gateway = Gateway(tmp_path / "model")
    assert gateway.ids(input=TEXTS) == expected_ids(reference)
    asked = gateway.ids(input=TEXTS, prompt_name="query")
    assert asked == expected_ids(reference, prompt="find")
    assert asked == gateway.ids(input=TEXTS, prompt="find")
    assert gateway.ids(input=[[5, 6]]) == [[5, 6]]
    messages = [{"role": "user", "content": TEXTS[0]}]
    if template is FLAT:
        assert gateway.ids(messages=_messages(messages)) == gateway.ids(input=TEXTS[:1])


def _messages(raw: list[dict[str, str]]) -> object:
    import msgspec

    from rose.serving.gateway.schemas import ChatMessage

    return msgspec.convert(raw, list[ChatMessage])


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_gateway_cuts_the_text_and_not_the_template(tmp_path, side):
    save(tmp_path, FLAT)
    gateway = Gateway(tmp_path / "model")
    whole = gateway.ids(input=TEXTS[1])[0]
    (cut,) = gateway.ids(input=TEXTS[1], truncate_prompt_tokens=20, truncation_side=side)
    head, tail = len("<user>"), len(".!?")
    assert len(cut) == 20
    assert cut[:head] == whole[:head]
    assert cut[-tail:] == whole[-tail:]
    text = whole[head:-tail]
    kept = 20 - head - tail
    assert cut[head:-tail] == (text[:kept] if side == "right" else text[-kept:])
    with pytest.raises(ApiError, match="take 9"):
        gateway.ids(input=TEXTS[1], truncate_prompt_tokens=9)


def test_a_template_that_refuses_names_the_text(tmp_path):
    refuses = "{% if 'bad' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}" + FLAT
    save(tmp_path, refuses)
    with pytest.raises(ApiError, match=r"input\[1\]"):
        Gateway(tmp_path / "model").ids(input=["good", "bad", "good"])


def test_a_pair_is_a_message_of_each_role(tmp_path):
    save(tmp_path, FLAT)
    card = load(tmp_path / "model").card
    chat = card.embedding.chat
    pair = render_pair(card.tokenizer, chat, "who", "me", "rank")
    assert pair == "<system>rank.<query>who.<document>me.!?"
    assert render_text(card.tokenizer, chat, "who") == "<user>who.!?"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"method": "forward", "method_output_name": "pooler"}, "message"),
        ({"format": "round"}, "format"),
        ("flat", "message"),
    ],
    ids=str,
)
def test_malformed_modalities(tmp_path, message, named):
    save(tmp_path, FLAT)
    path = tmp_path / "model"
    modalities = {"text": {}, "message": message}
    tiny.edit_json(path / "sentence_bert_config.json", modality_config=modalities)
    with pytest.raises(CheckpointError, match=named):
        load(path)
    (path / "chat_template.jinja").unlink()
    modalities["message"] = {"format": "flat"}
    tiny.edit_json(path / "sentence_bert_config.json", modality_config=modalities)
    with pytest.raises(CheckpointError, match="there is none"):
        load(path)


def test_the_form_is_told_by_the_template_where_nothing_says_it(tmp_path):
    for template in (FLAT, PARTS):
        save(tmp_path, template)
        path = tmp_path / "model"
        tiny.edit_json(
            path / "sentence_bert_config.json", modality_config={"text": {}, "message": {}}
        )
        assert load(path).card.embedding.chat.parts == (template is PARTS)
