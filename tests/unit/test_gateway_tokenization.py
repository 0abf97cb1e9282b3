"""The tokenizer without transformers: the same ids, cut as the field cuts them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.models.card import TokenizerCard
from rose.serving.gateway import tokenization
from rose.serving.gateway.tokenization import TextError, TokenizationError, Tokenizer
from tests.unit.gateway_stub import card, tokenizer_json

MODELS = Path(__file__).parents[2] / ".models"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_card(card(), tokenizer_json())


def test_baked_in_truncation_and_padding_are_off(tokenizer):
    long, short = tokenizer.encode(["red kite " * 20, "a"])
    assert len(long) == 42
    assert short.tolist() == [2, 5, 3]
    assert long.dtype == np.int32


def test_finds_special_tokens(tokenizer):
    assert (tokenizer.prefix.tolist(), tokenizer.suffix.tolist()) == ([2], [3])
    bare = Tokenizer.from_card(card(), tokenizer_json(specials=False))
    assert len(bare.prefix) == len(bare.suffix) == 0
    assert bare.encode([""])[0].tolist() == []


def test_an_odd_template_is_found_too():
    backend = tokenizers.Tokenizer.from_buffer(tokenizer_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] [MASK] $A [SEP] [MASK] [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3), ("[MASK]", 4)],
    )
    odd = Tokenizer.from_card(card(), backend.to_str().encode())
    assert (odd.prefix.tolist(), odd.suffix.tolist()) == ([2, 4], [3, 4, 3])


def test_special_tokens_can_be_left_out(tokenizer):
    assert tokenizer.encode(["a red"], add_special_tokens=False)[0].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("side", "keep", "expected"),
    [("right", 0, [2, 10, 11, 3]), ("left", 0, [2, 13, 14, 3]), ("left", 2, [2, 10, 14, 3])],
)
def test_cutting_keeps_special_tokens(tokenizer, side, keep, expected):
    ids = np.array([2, 10, 11, 12, 13, 14, 3], np.int32)
    assert tokenizer.cut(ids, 4, side, keep).tolist() == expected
    assert tokenizer.cut(ids, 7, side, keep) is ids


def test_cutting_ids_without_special_tokens(tokenizer):
    ids = np.arange(10, 20, dtype=np.int32)
    assert tokenizer.cut(ids, 3, "right").tolist() == [10, 11, 12]
    assert tokenizer.cut(ids, 3, "left").tolist() == [17, 18, 19]


def test_lowercase_is_put_before_the_normalizer_of_the_checkpoint():
    backend = tokenizers.Tokenizer.from_buffer(tokenizer_json())
    backend.normalizer = tokenizers.normalizers.NFC()
    source = backend.to_str().encode()
    cased = Tokenizer.from_card(card(), source)
    lower = Tokenizer.from_card(card(tokenizer={"lowercase": True}), source)
    assert cased.encode(["A RED"])[0].tolist() == [2, 1, 1, 3]
    assert lower.encode(["A RED"])[0].tolist() == [2, 5, 6, 3]
    assert lower.encode(["[SEP]"])[0].tolist() == [2, 3, 3]  # special tokens keep their case


def test_prompt_length_leaves_a_last_special_token_out(tokenizer):
    assert tokenizer.prompt_length("query : ") == 3  # [CLS] query :
    assert tokenizer.prompt_length("query : ", add_special_tokens=False) == 2


def test_decode(tokenizer):
    assert tokenizer.decode([2, 5, 6, 3], skip_special_tokens=True) == "a red"
    assert tokenizer.token_strings([2, 5, 63]) == ["[CLS]", "a", ""]


def test_unusable_tokenizer_names_the_model():
    with pytest.raises(TokenizationError, match=r"stub: tokenizer.json"):
        Tokenizer.from_card(card(), b"{}")


@pytest.mark.parametrize("text", ["\ud800", "red \udc00 kite"])
def test_half_of_a_surrogate_pair_is_no_text(tokenizer, text):
    with pytest.raises(TextError, match="surrogate"):
        tokenizer.encode(["red", text])
    with pytest.raises(TextError, match="surrogate"):
        tokenizer.prompt_length(text)


def test_a_text_that_the_vocabulary_cannot_write_is_refused():
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[CLS]": 0, "a": 1}))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with pytest.raises(TextError, match="UNK"):
        Tokenizer(backend, TokenizerCard()).encode(["a q"])


def test_certainly_longer(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenization, "PIECE_CHARS", 1000)
    assert tokenizer.certainly_longer("red " * 1000, 100)
    assert not tokenizer.certainly_longer("red " * 1000, 999)  # only a full count can tell
    assert not tokenizer.certainly_longer(" " * 100_000, 10)
    assert not tokenizer.certainly_longer("x" * 100_000, 110)  # pieces of one unknown word
    assert not tokenizer.certainly_longer("red " * 200, 10)  # short enough to count


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 1001, 12_345])
@pytest.mark.parametrize("text", ["red kite ", "xxxxx"])
def test_pieces_join_to_the_text(text, length):
    whole = (text * length)[:length]
    pieces = list(tokenization._pieces(whole, 1000))
    assert "".join(pieces) == whole
    assert len(whole) < 2000 or all(500 <= len(piece) <= 2500 for piece in pieces)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("text", ["red kite over ", "x", "a " * 50 + "y" * 500])
def test_ends_of_a_long_text_are_those_of_the_whole(tokenizer, monkeypatch, side, text):
    whole = text * (30_000 // len(text))
    expected = tokenizer.cut(tokenizer.encode([whole])[0], 20, side)
    monkeypatch.setattr(tokenization, "PIECE_CHARS", 3000)
    monkeypatch.setattr(tokenization, "GROUP_CHARS", 10_000)
    got = tokenizer.cut(tokenizer.encode_ends(whole, 20), 20, side)
    assert got.tolist() == expected.tolist()


def test_threads_share_it(tokenizer):
    texts = [f"a red kite {i} " * (i + 1) for i in range(50)]
    alone = [tokenizer.encode([text])[0].tolist() for text in texts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda text: tokenizer.encode([text])[0].tolist(), texts))
    assert together == alone


def test_no_torch():
    code = "import sys, rose.serving.gateway.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module", params=["all-MiniLM-L6-v2", "multilingual-e5-small"])
def pair(request):
    """Our tokenizer and that of transformers, for a real checkpoint."""
    folder = MODELS / request.param
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"{folder} is not there")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    names = {
        name: str(token)
        for name, token in theirs.special_tokens_map.items()
        if isinstance(token, str)
    }
    facts = card(request.param, vocab_size=len(theirs))
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Tokenizer(ours, TokenizerCard(special_tokens=names)), theirs, facts


@pytest.mark.golden
@given(
    texts=st.lists(
        st.text(max_size=60) | st.text(alphabet="aB ##▁<s>[SEP]\n\t é́ﬁ☕中文🦙", max_size=60),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=150, deadline=None)
def test_ids_equal_those_of_transformers(pair, texts):
    ours, theirs, _ = pair
    texts = [text.encode(errors="replace").decode() for text in texts]
    assert [row.tolist() for row in ours.encode(texts)] == theirs(texts)["input_ids"]
    plain = [row.tolist() for row in ours.encode(texts, add_special_tokens=False)]
    assert plain == theirs(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.golden
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_equals_that_of_transformers(pair, side):
    ours, theirs, _ = pair
    texts = ["The quick brown fox, " * 40, "über naïve 東京 " * 30, "short"]
    theirs.truncation_side = side
    for limit in (3, 8, 64, 200):
        expected = theirs(texts, truncation=True, max_length=limit)["input_ids"]
        got = [ours.cut(row, limit, side).tolist() for row in ours.encode(texts)]
        assert got == expected


@pytest.mark.golden
@pytest.mark.parametrize("prompt", ["query: ", "Represent this sentence:\n", "passage", "x\u2603"])
def test_prompt_length_equals_that_of_sentence_transformers(pair, prompt):
    ours, theirs, _ = pair
    ids = theirs(prompt)["input_ids"]  # the rule of its Transformer module
    expected = len(ids) - (ids[-1] in theirs.all_special_ids)
    assert ours.prompt_length(prompt) == expected
