"""The tokenizer files of a checkpoint, rebuilt from a GGUF file's vocabulary."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from rose.models.errors import ConvertError
from rose.models.gguf.reader import GgufFile

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # gguf.TokenType
_PADDING = re.compile(r"\[PAD\d+\]")  # rows that only round the embedding up

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

# Special tokens by their name in a tokenizer_config.json; the GGUF's own spelling on the right.
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
    "cls_token": "cls",
    "mask_token": "mask",
}
_END_OF_TURN = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def _split(*patterns: str) -> pre.PreTokenizer:
    """Split by each pattern in turn, then spell the pieces in GPT-2's byte alphabet."""
    splits: list[Any] = [pre.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre.PreTokenizer:
    return pre.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre.PreTokenizer:
    return pre.Sequence([pre.Digits(individual_digits=True), _gpt2()])


def _qwen2() -> pre.PreTokenizer:
    return _split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}")


def _llama3() -> pre.PreTokenizer:
    return _split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}")


def _llama_cpp_default() -> pre.PreTokenizer:
    return _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


_PRE_TOKENIZERS: dict[str, Callable[[], pre.PreTokenizer]] = {
    "default": _llama_cpp_default,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
}
_NFC = {"qwen2", "deepseek-r1-qwen"}
_LLAMA3 = {"llama-bpe", "llama3", "llama-v3"}


def write_tokenizer(gguf: GgufFile, folder: Path, tokenizer_from: Path | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat templates into `folder`.

    Args:
        gguf: the file with the vocabulary.
        folder: an existing folder.
        tokenizer_from: a folder with a tokenizer.json to take instead of the GGUF's vocabulary.

    Raises:
        ConvertError: a tokenizer that cannot be rebuilt exactly.
    """
    if tokenizer_from is not None:
        _copy_tokenizer(gguf, tokenizer_from, folder)
    else:
        _build_tokenizer(gguf).save(str(folder / "tokenizer.json"))
    settings = folder / "tokenizer_config.json"
    if not settings.exists():
        text = json.dumps(_tokenizer_config(gguf), indent=2, ensure_ascii=False)
        settings.write_text(text + "\n", encoding="utf-8")
    has_template = "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    if not has_template and not (folder / "chat_template.jinja").exists():
        _write_templates(gguf, folder)


def special_ids(gguf: GgufFile) -> dict[str, int]:
    """Ids of the special tokens that the file names: `{"bos_token": 1, ...}`.

    Raises:
        ConvertError: an id outside of the vocabulary.
    """
    size = len(_tokens(gguf))
    ids = {
        name: gguf.get(f"tokenizer.ggml.{key}_token_id", int, -1) for name, key in _SPECIAL.items()
    }
    for name, token_id in ids.items():
        if token_id >= size:
            raise gguf.error(f"{name} is {token_id}, but the vocabulary has {size} tokens")
    return {name: token_id for name, token_id in ids.items() if token_id >= 0}


def eos_token_ids(gguf: GgufFile) -> list[int]:
    """All ids that end a generation, the end of the text first.

    Besides the ids that the file names, these are the known end-of-turn tokens that its chat
    template writes: a model that chats ends its turn with one of them.
    """
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [gguf.get(key, int, -1) for key in keys]
    template = gguf.get("tokenizer.chat_template", str, "")
    ends = {token for token in _END_OF_TURN if token in template}
    ids += [i for i, token in enumerate(_tokens(gguf)) if token in ends]
    return [i for i in dict.fromkeys(ids) if i >= 0]


def _tokens(gguf: GgufFile) -> list[str]:
    return gguf.require("tokenizer.ggml.tokens", list)


def _build_tokenizer(gguf: GgufFile) -> Tokenizer:
    kind = gguf.require("tokenizer.ggml.model", str)
    name = gguf.get("tokenizer.ggml.pre", str, "default")
    if kind != "gpt2":
        raise gguf.error(
            f"has a tokenizer of type {kind!r}, and only byte-level BPE ('gpt2') can be rebuilt; "
            "give tokenizer_from, a folder with the model's own tokenizer.json"
        )
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise gguf.error(
            f"pre-tokenizer {name!r} is not among those known ({known}); "
            "give tokenizer_from, a folder with the model's own tokenizer.json"
        )
    tokenizer = Tokenizer(_bpe(gguf, ignore_merges=name in _LLAMA3))
    if name in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(gguf, tokenizer)
    _add_post_processor(gguf, tokenizer, bos_by_default=name in _LLAMA3)
    return tokenizer


def _bpe(gguf: GgufFile, *, ignore_merges: bool) -> models.BPE:
    tokens, kinds = _tokens(gguf), _token_types(gguf)
    if len(set(tokens)) != len(tokens):
        raise gguf.error("'tokenizer.ggml.tokens' holds a token twice")
    vocab = {token: i for i, token in enumerate(tokens) if not _is_padding(token, kinds[i])}
    merges = [tuple(merge.split(" ")) for merge in gguf.require("tokenizer.ggml.merges", list)]
    if any(len(merge) != 2 for merge in merges):
        raise gguf.error("'tokenizer.ggml.merges' holds a line that is not two tokens")
    try:
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    except Exception as e:  # tokenizers raises nothing narrower
        raise gguf.error(f"the BPE vocabulary is inconsistent ({e})") from e


def _token_types(gguf: GgufFile) -> list[int]:
    kinds: list[int] = gguf.require("tokenizer.ggml.token_type", list)
    if len(kinds) != len(_tokens(gguf)):
        raise gguf.error("'tokenizer.ggml.token_type' is not as long as 'tokenizer.ggml.tokens'")
    return kinds


def _is_padding(token: str, kind: int) -> bool:
    return kind in (_USER_DEFINED, _UNUSED) and _PADDING.fullmatch(token) is not None


def _add_tokens(gguf: GgufFile, tokenizer: Tokenizer) -> None:
    """Declare the tokens that are matched in the text before BPE; they keep their ids."""
    for token, kind in zip(_tokens(gguf), _token_types(gguf), strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED and not _is_padding(token, kind):
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_post_processor(gguf: GgufFile, tokenizer: Tokenizer, *, bos_by_default: bool) -> None:
    """Let encoding add the tokens that llama.cpp adds around a text."""
    ids, tokens = special_ids(gguf), _tokens(gguf)
    around = {"bos_token": bos_by_default, "eos_token": False}
    for name, default in around.items():
        flag = gguf.get(f"tokenizer.ggml.add_{name}", bool, default)
        if flag and name not in ids:
            raise gguf.error(f"asks to add a {name}, but names none")
        around[name] = flag
    if not any(around.values()):
        return
    bos, eos = ([tokens[ids[name]]] if flag else [] for name, flag in around.items())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[
            *bos,
            "$A",
            *eos,
            *(f"{token}:1" for token in bos),
            "$B:1",
            *(f"{token}:1" for token in eos),
        ],
        special_tokens=[(tokens[ids[name]], ids[name]) for name, flag in around.items() if flag],
    )


def _tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    tokens = _tokens(gguf)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.require(gguf.own("context_length"), int),
        "clean_up_tokenization_spaces": False,
        **{name: tokens[token_id] for name, token_id in special_ids(gguf).items()},
    }


def _write_templates(gguf: GgufFile, folder: Path) -> None:
    """Write the default chat template, and the named ones where there are any."""
    if template := gguf.get("tokenizer.chat_template", str, ""):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name in gguf.get("tokenizer.chat_templates", list, []):
        more = folder / "additional_chat_templates"
        more.mkdir(exist_ok=True)
        template = gguf.require(f"tokenizer.chat_template.{name}", str)
        (more / f"{Path(name).name}.jinja").write_text(template, encoding="utf-8")


def _copy_tokenizer(gguf: GgufFile, origin: Path, folder: Path) -> None:
    if not (origin / "tokenizer.json").is_file():
        raise ConvertError(f"{origin}: has no tokenizer.json to take for {gguf.path.name}")
    for name in ("tokenizer.json", *_BESIDE):
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
    _check_same_tokens(gguf, Tokenizer.from_file(str(folder / "tokenizer.json")), origin)


def _phantom(token: str | None) -> str:
    """A token of BERT's as llama.cpp spells it: a mark where words start, none where they go on."""
    token = token or ""
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def _check_same_tokens(gguf: GgufFile, tokenizer: Tokenizer, origin: Path) -> None:
    """Refuse another model's tokenizer. Ordinary tokens only: llama.cpp respells some others."""
    respelled = gguf.get("tokenizer.ggml.model", str, "") == "bert"
    for i, (token, kind) in enumerate(zip(_tokens(gguf), _token_types(gguf), strict=True)):
        found = tokenizer.id_to_token(i)
        if kind == _NORMAL and token not in (found, respelled and _phantom(found)):
            raise ConvertError(
                f"{origin}: its tokenizer is not that of {gguf.path}: "
                f"token {i} is {found!r} there and {token!r} here"
            )
