"""Pairs of texts: the same ids and segments as transformers, cut as it cuts them."""

import functools
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rose.models.card import ModelCard, ScoringCard, TokenizerCard
from rose.serving.gateway.pair_layout import find_pair_layout
from rose.serving.gateway.pairs import PairRules, longest_first, prepare_pairs
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.gateway.truncation import Limit
from tests import tiny

MODELS = Path(__file__).parents[2] / ".models"
PAIRS = [
    ("green kettle", "steam rises from it"),
    ("dot", "dash"),
    ("a </s> b", "c [SEP] d"),
    ("<s> [CLS]", "</s> [SEP] <end>"),
    ("", "a b c"),
    ("a b c", ""),
    ("sea " * 9, "kite " * 30),
    ("sea " * 30, "kite " * 9),
    ("sea " * 30, "kite " * 30),
    ("é 山 \U0001f999", "Kite, SEA!"),
]
TOKENIZERS = {
    "bert": tiny.bert_tokenizer,
    "roberta": tiny.roberta_tokenizer,
    "without special tokens": tiny.decoder_tokenizer,
    "with an end": lambda: tiny.decoder_tokenizer(end=True),
    "with a start": lambda: tiny.decoder_tokenizer(bos=True),
}
REAL = ["all-MiniLM-L6-v2", "multilingual-e5-small", "SmolLM2-135M-Instruct"]


@functools.cache  # they are large; whoever uses one says where it cuts
def real(name):
    if not (MODELS / name).exists():
        pytest.skip("needs the demo models: make models")
    return AutoTokenizer.from_pretrained(MODELS / name)


def load(name) -> PreTrainedTokenizerFast:
    return TOKENIZERS[name]() if name in TOKENIZERS else real(name)


def card(**changes) -> ModelCard:
    facts = {"kind": "cross_encoder", "labels": ("x",), "activation": "sigmoid"}
    scoring = ScoringCard(**{**facts, "probabilities": "sigmoid", "segment_ids": True, **changes})
    return ModelCard(
        name="toy",
        path="toy",
        architecture="bert",
        dtype="float32",
        tasks=("score",),
        vocab_size=1 << 20,
        max_model_len=4096,
        fingerprint="f",
        created=0,
        tokenizer=TokenizerCard(),
        scoring=scoring,
    )


@functools.cache
def served(tokenizer_json):
    return Tokenizer.from_card(card(), tokenizer_json.encode())


def encode(reference, pairs, tokens=4096, *, cut=False, side="right", **rules):
    reference.backend_tokenizer.no_truncation()  # a call before may have left one
    tokenizer = served(reference.backend_tokenizer.to_str())
    limit = Limit(tokens, cut, side, "truncate")
    queries = {f"q[{i}]": query for i, (query, _) in enumerate(pairs)}
    documents = {f"d[{i}]": document for i, (_, document) in enumerate(pairs)}
    found = prepare_pairs(card(), tokenizer, PairRules(limit, **rules), queries, documents)
    return [ids.tolist() for ids in found.ids], [part.tolist() for part in found.segments], found


def expected(reference, pairs, **options):
    """As lists: alone, an empty second text would be taken for none."""
    first, second = (list(texts) for texts in zip(*pairs, strict=True))
    found = reference(first, second, return_token_type_ids=True, **options)
    return found["input_ids"], found["token_type_ids"]


@pytest.mark.parametrize("name", [*TOKENIZERS, *REAL])
def test_whole_pairs(name):
    reference = load(name)
    ids, segments, found = encode(reference, PAIRS)
    assert (ids, segments) == expected(reference, PAIRS)
    assert found.truncated == 0


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limit", [8, 13, 32])
@pytest.mark.parametrize("name", [*TOKENIZERS, *REAL])
def test_cutting_the_longer_text(name, limit, side):
    reference = load(name)
    reference.truncation_side = side
    ids, segments, found = encode(reference, PAIRS, limit, cut=True, side=side)
    options = {"truncation": "longest_first", "max_length": limit}
    assert (ids, segments) == expected(reference, PAIRS, **options)
    whole, _ = expected(reference, PAIRS)
    assert found.truncated == sum(map(len, whole)) - sum(map(len, ids))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [*TOKENIZERS, *REAL])
def test_cutting_the_document_alone(name, side):
    reference = load(name)
    reference.truncation_side = side
    pairs = [("a b", "kite " * 30), ("sea", "green tea and a red kite over the sea")]
    ids, segments, _ = encode(reference, pairs, 14, cut=True, side=side, only_second=True)
    options = {"truncation": "only_second", "max_length": 14}
    assert (ids, segments) == expected(reference, pairs, **options)


def test_tokens_of_a_document_are_counted_without_its_query():
    reference = tiny.bert_tokenizer()
    pairs = [("a b c", "kite sea tea kite"), ("a", "kite")]
    ids, segments, found = encode(reference, pairs, max_document_tokens=2)
    shorter = [("a b c", "kite sea"), ("a", "kite")]
    assert (ids, segments) == expected(reference, shorter)
    assert found.truncated == 2


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 50))
def test_the_librarys_way_to_cut_the_longer_text(first, second, room):
    backend = tiny.decoder_tokenizer().backend_tokenizer
    backend.enable_truncation(room, strategy="longest_first")
    encoding = backend.encode("a" * first, "b" * second)
    kept = tuple(encoding.sequence_ids.count(text) for text in (0, 1))
    assert longest_first(first, second, room) == kept


def test_odd_templates():
    backend = tiny.bert_tokenizer().backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="$A",
        pair="[MASK]:1 [CLS] $A [SEP]:1 [MASK] [SEP] $B:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3), ("[MASK]", 4)],
    )
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids, segments, _ = encode(reference, PAIRS)
    assert (ids, segments) == expected(reference, PAIRS)
    for strange in ("$B $A", "$A $B $A"):
        backend.post_processor = processors.TemplateProcessing(
            single="$A", pair=strange, special_tokens=[("[CLS]", 2)]
        )
        assert find_pair_layout(backend) is None


def test_one_query_is_the_query_of_all_documents():
    reference = tiny.roberta_tokenizer()
    tokenizer = Tokenizer.from_card(card(), reference.backend_tokenizer.to_str().encode())
    rules = PairRules(Limit(99, False, "right", "truncate"))
    documents = {f"d[{i}]": text for i, text in enumerate(("kite", "", "sea sea"))}
    found = prepare_pairs(card(), tokenizer, rules, {"query": "green tea"}, documents)
    pairs = [("green tea", text) for text in documents.values()]
    assert [ids.tolist() for ids in found.ids] == expected(reference, pairs)[0]


def test_a_very_long_document_is_cut_without_being_tokenised_whole(monkeypatch):
    from rose.serving.gateway import pairs as module
    from rose.serving.gateway import tokenization

    reference = tiny.bert_tokenizer()
    pair = ("red kite", "tea sea kite " * 3000)
    whole = [encode(reference, [pair], 40, cut=True, side=side)[0] for side in ("right", "left")]
    for changed in (module, tokenization):
        monkeypatch.setattr(changed, "GROUP_CHARS", 2000)
    monkeypatch.setattr(tokenization, "PIECE_CHARS", 1000)
    monkeypatch.setattr(tokenization, "MARGIN_TOKENS", 16)
    again = [encode(reference, [pair], 40, cut=True, side=side)[0] for side in ("right", "left")]
    assert whole == again


def test_ids_are_int32():
    reference = tiny.bert_tokenizer()
    *_, found = encode(reference, PAIRS)
    assert {ids.dtype for ids in found.ids} == {np.dtype(np.int32)}
    assert {part.dtype for part in found.segments} == {np.dtype(np.int32)}
    assert isinstance(reference.backend_tokenizer, tokenizers.Tokenizer)
