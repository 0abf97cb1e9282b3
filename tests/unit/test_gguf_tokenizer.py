"""Tokenizers rebuilt from a GGUF file, compared with the ones whose vocabulary was written."""

import json

import gguf
import pytest
from tokenizers import Regex, Tokenizer, normalizers, processors
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer

from rose.models.gguf import ConvertError, convert_gguf
from tests.unit.gguf_files import (
    CLASSIC,
    TEXTS,
    bpe,
    gguf_name,
    stored,
    tiny_model,
    write_gguf,
    write_sizes,
)

QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def published(name):
    """The tokenizers as their makers publish them."""
    if name == "smollm":
        return bpe(pre.Sequence([pre.Digits(True), pre.ByteLevel(add_prefix_space=False)]))
    if name == "gpt-2":
        return bpe(pre.ByteLevel(add_prefix_space=False))
    pattern = QWEN2 if name == "qwen2" else LLAMA3
    splits = [pre.Split(Regex(pattern), "isolated"), pre.ByteLevel(False, use_regex=False)]
    tokenizer = bpe(pre.Sequence(splits), normalizers.NFC() if name == "qwen2" else None)
    if name == "llama-bpe":
        tokenizer.model.ignore_merges = True
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    return tokenizer


@pytest.mark.parametrize("name", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_the_rebuilt_tokenizer_gives_the_same_ids(tmp_path, name):
    reference = published(name)
    source = write_gguf(
        tmp_path / "m.gguf", "llama", tiny_model("llama"), tokenizer=reference, pre=name
    )
    convert_gguf(source, tmp_path / "out")
    rebuilt = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in [*TEXTS, "<|im_start|>Hi 12<|im_end|>", "e\u0301"]:
        assert rebuilt.encode(text).ids == reference.encode(text).ids
        if name != "qwen2":  # which composes characters first
            assert rebuilt.decode(rebuilt.encode(text, add_special_tokens=False).ids, False) == text
    assert not any(token.startswith("[PAD") for token in rebuilt.get_vocab())


def test_default_splits_as_llama_cpp_does(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), pre="default")
    convert_gguf(source, tmp_path / "out")
    rebuilt = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    pieces = [piece for piece, _ in rebuilt.pre_tokenizer.pre_tokenize_str("a+1234, it's")]
    # Punctuation first, so no space sticks to it and 's is no contraction; then three digits.
    assert pieces == ["a", "+", "123", "4", ",", "Ġit", "'", "s"]
    assert all(rebuilt.decode(rebuilt.encode(text).ids) == text for text in TEXTS)


def test_transformers_reads_the_tokenizer_and_template(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    convert_gguf(source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>Hi<|im_end|>"
    rebuilt = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert all(tokenizer(text)["input_ids"] == rebuilt.encode(text).ids for text in TEXTS)


def test_all_ends_of_a_turn_end_a_generation(tmp_path):
    settings = {"tokenizer.ggml.eot_token_id": 5}
    source = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), settings=settings)
    convert_gguf(source, tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 5]  # eos, eot; <|im_end|> of the template is eos


def sentencepiece_gguf(path, tokenizer):
    """A file with the tokens of `tokenizer` whose type says SentencePiece."""
    writer = gguf.GGUFWriter(path, "llama")
    model = tiny_model("llama")
    write_sizes(writer, model.config, ())
    for name, values in model.state_dict().items():
        values = stored("llama", name, values.numpy(), model.config)
        writer.add_tensor(gguf_name(name, CLASSIC), values)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sentencepiece_needs_the_model_s_own_tokenizer(tmp_path):
    reference = bpe(pre.ByteLevel(False))
    source = sentencepiece_gguf(tmp_path / "m.gguf", reference)
    with pytest.raises(ConvertError, match=r"m\.gguf.*'llama'.*tokenizer_from"):
        convert_gguf(source, tmp_path / "out")

    own = tmp_path / "own"
    own.mkdir()
    with pytest.raises(ConvertError, match=r"own: has no tokenizer\.json"):
        convert_gguf(source, tmp_path / "out", tokenizer_from=own)
    published("smollm").save(str(own / "tokenizer.json"))
    with pytest.raises(ConvertError, match=r"own: its tokenizer is not that of .*m\.gguf: token"):
        convert_gguf(source, tmp_path / "out", tokenizer_from=own)
    reference.save(str(own / "tokenizer.json"))
    convert_gguf(source, tmp_path / "out", tokenizer_from=own)
    rebuilt = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert rebuilt.encode(TEXTS[0]).ids == reference.encode(TEXTS[0]).ids
