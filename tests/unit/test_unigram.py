"""Unigram tokenizers in C++: the library's ids, or the library itself."""

import json
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors

from rose.kernels.compiling import BuildError, find_compiler
from rose.models.card import TokenizerCard
from rose.serving.cli import main
from rose.serving.gateway.tokenization import TextError, Tokenizer
from rose.serving.gateway.unigram import checked
from rose.serving.gateway.unigram import encoder as unigram_encoder
from rose.serving.gateway.unigram.checked import PROBES, fast_encoder
from rose.serving.gateway.unigram.encoder import SWITCH, UnigramEncoder, load_library
from rose.serving.gateway.unigram.facts import Unsupported, read_facts
from tools.charsmap import compile_charsmap, nmt_nfkc_rules
from tools.odd_texts import MARKS, every_character, odd_texts
from tools.texts import WORDS, mixed_texts

E5 = Path(__file__).parents[2] / ".models" / "multilingual-e5-small" / "tokenizer.json"
SPACES = normalizers.Replace(Regex(" {2,}"), " ")


@pytest.fixture(autouse=True, scope="module")
def compiler() -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


def vocabulary() -> list[tuple[str, float]]:
    """Special tokens, letters, and parts of words; few scores, so that many ways are equal."""
    rng = random.Random(0)
    words = [word for words in WORDS.values() for word in words]
    parts = {f"\u2581{word}"[: rng.randrange(1, 6)] for word in words for _ in range(3)}
    for word in words:
        start = rng.randrange(len(word))
        parts.add(word[start : start + rng.randrange(1, 5)])
    letters = {letter for word in words for letter in word if rng.random() < 0.9}
    pieces = sorted(parts | letters | {"\u2581", "\U00020000\ufffe", "<s", "\0a"})
    scored = [(piece, -rng.choice([1.0, 2.0, 2.5, 3.3, 1e-3 / 3])) for piece in pieces]
    bytes_ = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    again = [(piece, score - 1) for piece, score in scored[::17]]  # of two the later one counts
    return [*[(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")], *scored, *bytes_, *again]


def new_backend(
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    byte_fallback: bool = False,
) -> tokenizers.Tokenizer:
    model = tokenizers.models.Unigram(vocabulary(), 3, byte_fallback)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.Metaspace()
    backend.add_special_tokens(
        [AddedToken(name, normalized=False) for name in ("<s>", "<pad>", "</s>", "<unk>")]
    )
    backend.add_special_tokens([AddedToken("<mask>", normalized=False, lstrip=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


@cache
def charsmap() -> normalizers.Normalizer:
    return normalizers.Precompiled(compile_charsmap(nmt_nfkc_rules()))


def xlm_r() -> tokenizers.Tokenizer:
    parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    return new_backend(charsmap(), pre_tokenizers.Sequence(parts))


def bge_m3() -> tokenizers.Tokenizer:
    return new_backend(normalizers.Sequence([charsmap(), SPACES]))


def nfkc() -> tokenizers.Tokenizer:
    tilde = normalizers.Replace("\uff5e", "\ue000")
    back = normalizers.Replace("\ue000", "\uff5e")
    parts = [tilde, normalizers.Nmt(), normalizers.NFKC(), back, SPACES]
    return new_backend(normalizers.Sequence(parts))


def plain() -> tokenizers.Tokenizer:
    backend = new_backend(None, pre_tokenizers.Metaspace(prepend_scheme="never"))
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return backend


def one_word_with_bytes() -> tokenizers.Tokenizer:
    marks = normalizers.Replace(Regex(" {2,}"), "\u2581")
    pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend = new_backend(normalizers.Sequence([charsmap(), marks]), pre_tokenizer, True)
    backend.add_tokens([AddedToken("Straße", normalized=True), AddedToken("ﬁ", normalized=True)])
    backend.post_processor = None
    return backend


def e5() -> tokenizers.Tokenizer:
    if not E5.exists():
        pytest.skip("needs multilingual-e5-small in .models")
    backend = tokenizers.Tokenizer.from_buffer(E5.read_bytes())
    backend.no_truncation()
    backend.no_padding()
    return backend


KINDS = (xlm_r, bge_m3, nfkc, plain, one_word_with_bytes, e5)


@cache
def pair(kind: Callable[[], tokenizers.Tokenizer]) -> tuple[tokenizers.Tokenizer, UnigramEncoder]:
    backend = kind()
    encoder = fast_encoder(backend)
    assert encoder is not None
    return backend, encoder


def assert_same(kind: Callable[[], tokenizers.Tokenizer], texts: list[str]) -> int:
    """How many texts were encoded, with the library's ids, with special tokens and without."""
    backend, encoder = pair(kind)
    encoded = 0
    for special in (True, False):
        theirs = backend.encode_batch_fast(texts, add_special_tokens=special)
        for text, a, b in zip(texts, theirs, encoder.encode(texts, special=special), strict=True):
            assert b is None or b.tolist() == a.ids, ascii(text)
            encoded += b is not None
    return encoded // 2


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(kind):
    texts = mixed_texts(200, seed=3, most_words=60)
    assert assert_same(kind, texts) > 180
    texts = odd_texts(1000, seed=4)
    assert assert_same(kind, texts) > 100
    assert assert_same(kind, every_character(step=97)) > 500


CHARACTERS = st.characters(exclude_categories=["Cs"])
PARTS = st.one_of(
    *(CHARACTERS, st.sampled_from(MARKS), st.sampled_from(["<s>", "<mask>", " ", "\u2581", "  "])),
    *(st.text("aeo cdﬁ\u00aa\u00a0", max_size=5), st.sampled_from(["Straße", "\r\n", "\u2122"])),
)


@pytest.mark.parametrize("kind", KINDS[:-1])
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(PARTS, max_size=12))
def test_ids_of_any_text(kind, parts):
    assert_same(kind, ["".join(parts)])


@pytest.mark.parametrize("kind", [xlm_r, nfkc, one_word_with_bytes])
def test_long_texts(kind):
    text = " ".join(WORDS["English"] + WORDS["Russian"])
    texts = [text * 300, text.replace(" ", "") * 300, "x" * 100_000, " " * 100_000]
    assert assert_same(kind, [*texts, "e\u0301" * 50_000, "\u0301" * 50_000]) >= 4


def test_threads_share_an_encoder():
    texts = [f"{text} {i}" for i, text in enumerate(mixed_texts(100, seed=5))]
    encoder = pair(bge_m3)[1]
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: encoder.encode(texts, special=True), range(8)))
    flat = [[None if row is None else row.tolist() for row in found] for found in rows]
    assert all(found == flat[0] for found in flat)
    assert assert_same(bge_m3, texts) > 80


def test_what_is_left_to_the_library():
    def left(kind, *texts: str) -> list[bool]:
        assert_same(kind, list(texts))
        return [ids is None for ids in pair(kind)[1].encode(texts, special=True)]

    assert left(nfkc, "a <s> b</s>", "a <mask>", "\uff1cs\uff1e") == [False, True, True]
    assert left(nfkc, "\u0378", "\U0001fae8 new emoji", "\u32ff") == [True, False, True]
    assert left(xlm_r, "e\u0301", "\u1f00\u0301 Greek", "\u0675\u064e") == [False, False, True]
    assert left(one_word_with_bytes, "die Straße", "die Strasse") == [True, False]
    long = "\ufdfa" * 50  # each of them becomes 18 letters: more tokens than there is room for
    assert left(one_word_with_bytes, long) == [True]


def through_the_gateway(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, TokenizerCard())


@pytest.mark.parametrize("kind", [xlm_r, nfkc])
def test_the_gateway_takes_both(kind):
    tokenizer = through_the_gateway(kind())
    assert tokenizer.encodes_fast
    texts = [*odd_texts(300, seed=6), "", "\u0378", *PROBES]
    for special in (True, False):
        expected = kind().encode_batch(texts, add_special_tokens=special)
        found = tokenizer.encode(texts, add_special_tokens=special)
        assert [ids.tolist() for ids in found] == [encoding.ids for encoding in expected]


def test_half_of_a_surrogate_pair():
    with pytest.raises(TextError, match="surrogate"):
        through_the_gateway(xlm_r()).encode(["fine", "\ud800"])


UNKNOWN_PARTS = {
    "normalizer": {"normalizer": normalizers.Lowercase()},
    "normalizer in a row": {"normalizer": normalizers.Sequence([charsmap(), normalizers.NFD()])},
    "normalizer's pattern": {"normalizer": normalizers.Replace(Regex("a+"), "b")},
    "pre_tokenizer": {"pre_tokenizer": pre_tokenizers.Whitespace()},
    "pre_tokenizer: none": {"pre_tokenizer": None},
    "pre_tokenizer's prepend": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
    "post_processor": {"post_processor": processors.ByteLevel()},
    "encode_special_tokens": {"encode_special_tokens": True},
    "model": {"model": tokenizers.models.BPE()},
    "model: no unk_id": {"model": tokenizers.models.Unigram([("a", 0.0)], None, False)},
    "model: an empty piece": {
        "model": tokenizers.models.Unigram([("", 0.0), ("a", 0.0)], 0, False)
    },
}


@pytest.mark.parametrize("name", UNKNOWN_PARTS)
def test_tokenizers_with_unknown_parts_are_left_to_the_library(name):
    backend = bge_m3()
    for part, value in UNKNOWN_PARTS[name].items():
        setattr(backend, part, value)
    with pytest.raises(Unsupported, match=name.split()[0].split("'")[0]):
        read_facts(backend)
    assert fast_encoder(backend) is None


def test_scores_are_the_librarys():
    """Its reading of JSON may differ from Python's in the last bit, which decides between equals."""
    source = new_backend().to_str().replace("-3.3]", "-11.137260437011719]")
    backend = tokenizers.Tokenizer.from_str(source)
    held = json.loads(backend.model.__getstate__())["vocab"]
    assert list(read_facts(backend).scores) == [score for _, score in held]
    assert len({score for _, score in held if score < -11}) == 2  # these and the bytes


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An empty cache, and no memory of what was loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(unigram_encoder, "_loaded", [])
    return monkeypatch


def assert_the_library_serves(texts: list[str]) -> None:
    tokenizer = through_the_gateway(bge_m3())
    assert not tokenizer.encodes_fast
    expected = bge_m3().encode_batch(texts)
    assert [ids.tolist() for ids in tokenizer.encode(texts)] == [e.ids for e in expected]


@pytest.mark.parametrize(
    ("name", "value"), [("PATH", ""), ("CXX", "false"), ("CXX", "no-compiler-of-this-name")]
)
def test_without_a_compiler(fresh, caplog, name, value):
    fresh.delenv("CXX", raising=False)
    fresh.setenv(name, value)
    with caplog.at_level(logging.INFO):
        assert_the_library_serves(odd_texts(50, seed=7))
    assert "the tokenizers library is used, because" in caplog.text


def test_switched_off(fresh, caplog):
    fresh.setenv(SWITCH, "off")
    assert_the_library_serves(odd_texts(50, seed=8))
    assert not caplog.records


def test_an_unknown_switch(fresh):
    fresh.setenv(SWITCH, "maybe")
    with pytest.raises(ValueError, match=f"{SWITCH}='maybe'"):
        load_library()


def test_a_gateway_does_not_start_with_an_unknown_switch(fresh, capsys):
    fresh.setenv(SWITCH, "maybe")
    with pytest.raises(SystemExit, match="1"):
        main(["gateway", "--engine", "ipc:///no/engine"])
    assert f"error: {SWITCH}='maybe'" in capsys.readouterr().err


def test_an_encoder_that_disagrees_is_not_used(monkeypatch, caplog):
    def other_facts(backend: tokenizers.Tokenizer):
        facts = read_facts(backend)
        return replace(facts, scores=facts.scores[::-1])

    monkeypatch.setattr(checked, "read_facts", other_facts)
    assert_the_library_serves(["some words"])
    assert "otherwise" in caplog.text


def test_a_damaged_charsmap_is_left_to_the_library():
    library = load_library()
    assert library is not None
    facts = read_facts(bge_m3())
    stage = facts.stages[0]
    for blob in (b"", stage.blob[:2], stage.blob[:3000], stage.blob[:100_000]):
        cut = UnigramEncoder(library, replace(facts, stages=[replace(stage, blob=blob)]))
        found = cut.encode(["ASCII", *odd_texts(200, seed=9)], special=True)
        assert any(ids is None for ids in found)
