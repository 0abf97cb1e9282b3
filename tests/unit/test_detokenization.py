"""Incremental detokenisation and stop strings, against the tokenizer's own decoding."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from rose.serving.gateway.detokenization import (
    IncrementalDetokenizer,
    OutputText,
    StopStrings,
    TokenTable,
    byte_level_bytes,
)

SMOLLM = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct" / "tokenizer.json"
CORPUS = [
    "the quick brown fox jumps over the lazy dog, isn't it? 1, 2, 3",
    "日本語のテキスト und Größe, naïve café",
    "🦙🧪 emoji 🦙",
]
FIN = "<\uff5cfin▁\uff5c>"  # letters that no byte is written with
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=alphabet,
        special_tokens=["<|end|>", FIN],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("plain added", normalized=False), "€"])
    return tokenizer


def llama() -> tokenizers.Tokenizer:
    words = ["▁the", "▁", "▁fox", "er", "s", "é", "▁▁", "x", REPLACEMENT, "<0xZZ>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def with_decoder(decoder: decoders.Decoder | None, words: list[str]) -> tokenizers.Tokenizer:
    vocab = {word: i for i, word in enumerate(["[UNK]", "[SEP]", *words])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[SEP]"])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


WORDS = ["▁the", "▁", "▁fox", "er", "s", "▁▁x", "é"]
PIECES = ["the", "fox", "##es", "##'", ".", ",", "'", "s", "n't", "##日"]
BUILDERS = {
    "byte-level": byte_level,
    "llama": llama,
    "metaspace": lambda: with_decoder(decoders.Metaspace(), WORDS),
    "metaspace-never": lambda: with_decoder(decoders.Metaspace(prepend_scheme="never"), WORDS),
    "wordpiece": lambda: with_decoder(decoders.WordPiece(), PIECES),
    "wordpiece-raw": lambda: with_decoder(decoders.WordPiece(cleanup=False), PIECES),
    "bpe-suffix": lambda: with_decoder(decoders.BPEDecoder(), ["low</w>", "er</w>", "x", "</w>"]),
    "none": lambda: with_decoder(None, ["a", "b", "é"]),
}


@cache
def table(name: str) -> TokenTable:
    if name == "smollm2":
        return TokenTable(tokenizers.Tokenizer.from_file(str(SMOLLM)))
    return TokenTable(BUILDERS[name]())


def incremental(table: TokenTable, ids: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(table, skip_special_tokens=skip)
    return [*(detokenizer.push([i]) for i in ids), detokenizer.finish()]


def check_exact(table: TokenTable, ids: list[int], skip: bool) -> None:
    expected = table.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(incremental(table, ids, skip)) == expected


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    size = table(name).backend.get_vocab_size()
    return st.lists(st.integers(0, size + 4), max_size=24)


@pytest.mark.parametrize("name", BUILDERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_pieces_joined_are_the_decoded_whole(name, data, skip):
    check_exact(table(name), data.draw(ids_of(name)), skip)


@pytest.mark.parametrize("name", BUILDERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_goes_on_from_a_text_begins_none(name, data):
    """Where the context ends in a word, context and output put together are the decoded whole."""
    known = table(name)
    context = [next(i for w in ("▁fox", "fox", "x", "a") if (i := known.backend.token_to_id(w)))]
    ids = data.draw(ids_of(name))
    detokenizer = IncrementalDetokenizer(known, skip_special_tokens=False, context=context)
    text = detokenizer.push(ids) + detokenizer.finish()
    whole = known.backend.decode(context + ids, skip_special_tokens=False)
    assert known.backend.decode(context) + text == whole


@pytest.mark.parametrize("context", [[], ["[SEP]"], ["▁"]])
def test_a_text_begins_where_there_is_none_before(context):
    known = table("metaspace")
    ids = [known.backend.token_to_id(token) for token in (*context, "▁fox")]
    detokenizer = IncrementalDetokenizer(known, context=ids[:-1])
    assert detokenizer.push(ids[-1:]) == "fox"


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_runs_of_byte_tokens_are_exact(data, skip):
    token = st.sampled_from([0, 2, 3 + 0x41, *(3 + b for b in "日🦙é".encode()), 259, 260, 262])
    check_exact(table("llama"), data.draw(st.lists(token, max_size=24)), skip)


@pytest.mark.golden
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_joined_are_the_decoded_whole_for_a_real_tokenizer(ids, skip):
    check_exact(table("smollm2"), ids, skip)


@pytest.mark.parametrize("name", ["byte-level", "llama"])
@given(text=st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_a_valid_text_never_shows_half_a_character(name, text):
    if name == "byte-level":
        ids = table(name).backend.encode(text, add_special_tokens=False).ids
    else:
        ids = [3 + byte for byte in text.encode()]
    pieces = incremental(table(name), ids, skip=False)
    assert "".join(pieces) == table(name).backend.decode(ids, skip_special_tokens=False)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_an_incomplete_character_comes_once_and_last():
    tokenizer = table("byte-level")
    alphabet = {byte_level_bytes(t): i for t, i in tokenizer.backend.get_vocab().items()}
    ids = [alphabet[bytes([byte])] for byte in "a🦙".encode()][:-1]
    pieces = incremental(tokenizer, ids, skip=True)
    assert pieces == ["a", "", "", "", REPLACEMENT]


def test_ids_beyond_the_tokenizer_have_no_text():
    size = table("byte-level").backend.get_vocab_size()
    fox = table("byte-level").backend.encode("fox").ids
    assert "".join(incremental(table("byte-level"), [size + 7, *fox, size], skip=True)) == "fox"
    assert table("byte-level").token_bytes(size) == b""


def test_bytes_of_tokens_in_the_middle_of_a_text():
    def of(name: str, token: str) -> bytes:
        return table(name).token_bytes(table(name).backend.token_to_id(token))

    assert of("byte-level", "Ġthe") == b" the"
    assert of("byte-level", FIN) == FIN.encode()
    assert of("llama", "<0xE6>") == b"\xe6"
    assert of("llama", "▁the") == b" the"
    assert of("metaspace", "▁the") == b" the"
    assert of("wordpiece", "##es") == b"es"
    assert of("wordpiece", "fox") == b" fox"


@pytest.mark.parametrize("name", ["byte-level", "llama", "metaspace", "wordpiece"])
def test_work_per_token_does_not_grow_with_the_output(name, monkeypatch):
    known, lengths = table(name), [0]
    decode = known.decode
    monkeypatch.setattr(
        known, "decode", lambda ids, **kw: lengths.append(len(ids)) or decode(ids, **kw)
    )
    detokenizer = IncrementalDetokenizer(known)
    first = 259 if known.has_byte_fallback else 0  # a run of bytes is decoded once, as a whole
    for i in range(3000):
        detokenizer.push([first + i % (known.backend.get_vocab_size() - first)])
    assert max(lengths) <= 6


TEXT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 and aab aaab"


def stopped(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, StopStrings]:
    finder = StopStrings(stops, include=include)
    sent = ""
    for piece in pieces:
        sent += finder.push(piece)
        for stop in stops:
            assert include or stop not in sent
    return sent + finder.finish(), finder


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_at_every_offset(length, size):
    pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    for offset in range(len(TEXT) - length + 1):
        stop = TEXT[offset : offset + length]
        expected = TEXT[: TEXT.find(stop)]
        text, finder = stopped(pieces, [stop])
        assert text == expected
        assert finder.matched == stop
        assert stopped(pieces, [stop], include=True)[0] == expected + stop


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text, stops, cuts, include):
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    expected, matched = text, None
    if ends:
        end, _, matched = min(ends)
        expected = text[:end] if include else text[: end - len(matched)]
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    finder = StopStrings(stops, include=include)
    pieces = [finder.push(text[a:b]) for a, b in pairwise(bounds)]
    assert "".join(pieces) + finder.finish() == expected
    assert finder.matched == matched


@given(text=st.text("ab", max_size=30), stop=st.text("ab", min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_nothing_is_held_back_longer_than_needed(text, stop):
    finder = StopStrings([stop])
    sent = ""
    for i, char in enumerate(text):
        sent += finder.push(char)
        if finder.matched is not None:
            break
        seen = text[: i + 1]
        longest = max(k for k in range(len(stop)) if seen.endswith(stop[:k]))
        assert sent == seen[: len(seen) - longest]


def test_text_goes_through_when_there_is_nothing_to_stop_at():
    finder = StopStrings(["", ""])
    assert finder.push("abc") == "abc"
    assert finder.finish() == ""


def test_output_text_drops_what_follows_the_stop_string_in_the_same_token():
    tokenizer = table("metaspace")
    the, fox = (tokenizer.backend.token_to_id(token) for token in ("▁the", "▁fox"))
    output = OutputText(tokenizer, ["e f"])
    assert output.push([the]) == "th"
    assert output.push([fox]) == ""
    assert output.matched == "e f"
    assert output.push([the]) == ""
    assert output.finish() == ""


def test_output_text_gives_what_was_held_back_at_the_end():
    tokenizer = table("metaspace")
    the = tokenizer.backend.token_to_id("▁the")
    output = OutputText(tokenizer, ["e fox"])
    assert output.push([the]) == "th"
    assert output.finish() == "e"
    assert output.matched is None


def test_special_tokens_can_be_kept():
    tokenizer = table("byte-level")
    end = tokenizer.backend.token_to_id("<|end|>")
    assert OutputText(tokenizer).push([end]) == ""
    assert OutputText(tokenizer, skip_special_tokens=False).push([end]) == "<|end|>"


@pytest.mark.golden
@pytest.mark.parametrize("text", ["🦙🧪 日本 café", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"])
def test_stop_strings_over_real_tokens(text):
    tokenizer = table("smollm2")
    ids = tokenizer.backend.encode(text).ids
    for length in range(1, 13):
        for offset in range(len(text) - length + 1):
            stop = text[offset : offset + length]
            output = OutputText(tokenizer, [stop])
            assert "".join(output.push([i]) for i in ids) == text[: text.find(stop)]
