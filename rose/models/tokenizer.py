"""The tokenizer of a checkpoint: its tokenizer.json and the facts beside it. Free of torch."""

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from rose.models.added_tokens import TOKENIZER_CONFIG, add_tokens, special_tokens, token_text
from rose.models.card import TokenizerCard
from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_FOLDER = "additional_chat_templates"
# Classes that apply tokenizer_config.json's options to the normaliser, and the architectures whose
# tokenizer is one of them where tokenizer_config.json names none.
_BERT_CLASSES = tuple(
    f"{name}Tokenizer{fast}" for name in ("Bert", "DistilBert", "MPNet") for fast in ("", "Fast")
)
_SEGMENT_CLASSES = ("BertTokenizer", "BertTokenizerFast")
_BERT_LIKE = ("bert", "distilbert", "nomic_bert")
# Letters that a vocabulary hardly has all of: of old scripts, a rare ideograph, and no letter.
_RARE = "\U00010400\U00012000\U00013000\U00016800\U0002a6d6\U00030000\uffff"


def read_tokenizer_json(folder: CheckpointFolder) -> bytes:
    """Return a tokenizer.json without the truncation and padding that were saved with it.

    Both are the gateway's to decide.

    Raises:
        CheckpointError: there is no tokenizer.json and none can be built, or it is damaged, or
            fails on some texts.
    """
    return load_tokenizer(folder).to_str().encode()


def load_tokenizer(folder: CheckpointFolder) -> Tokenizer:
    """Return what `read_tokenizer_json` writes; the same errors."""
    tokenizer = _open_tokenizer(folder)
    _check_any_text(tokenizer, folder)
    _apply_bert_options(tokenizer, folder)
    add_tokens(tokenizer, folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def lowercases(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer makes no difference between large and small letters."""
    normalizer = tokenizer.normalizer
    return normalizer is not None and "K" not in normalizer.normalize_str("a Kite")


def _open_tokenizer(folder: CheckpointFolder) -> Tokenizer:
    text = folder.text(TOKENIZER_FILE)
    if text is None:
        return _build_tokenizer(folder)
    try:
        return Tokenizer.from_str(text)
    # The library raises plain Exception.
    except Exception as error:
        path = folder.path / TOKENIZER_FILE
        raise CheckpointError(f"{path}: not a usable tokenizer: {error}") from error


def _check_any_text(tokenizer: Tokenizer, folder: CheckpointFolder) -> None:
    """Refuse a tokenizer that fails on what it does not know, before a request meets it.

    Raises:
        CheckpointError: it does, or it has no tokens at all.
    """
    file = TOKENIZER_FILE if folder.exists(TOKENIZER_FILE) else "vocab.txt"
    path = folder.path / file
    if not tokenizer.get_vocab_size(with_added_tokens=False):
        raise CheckpointError(f"{path}: model: vocab: it is empty")
    try:
        for letter in _RARE:
            tokenizer.encode(letter, add_special_tokens=False)
    # The library raises plain Exception.
    except Exception as error:
        raise CheckpointError(
            f"{path}: model: unk_token: a text with an unknown letter cannot be tokenised: {error}"
        ) from error


def _apply_bert_options(tokenizer: Tokenizer, folder: CheckpointFolder) -> None:
    """Let tokenizer_config.json win over tokenizer.json, as BERT's tokenizer class does."""
    kind = _tokenizer_class(folder)
    normalizer = tokenizer.normalizer
    if kind not in _BERT_CLASSES or not isinstance(normalizer, BertNormalizer):
        return
    tokenizer.normalizer = BertNormalizer(
        clean_text=normalizer.clean_text,
        handle_chinese_chars=_flag(
            folder, "tokenize_chinese_chars", default=normalizer.handle_chinese_chars
        ),
        strip_accents=_strip_accents(folder, normalizer.strip_accents),
        lowercase=_flag(folder, "do_lower_case", default=normalizer.lowercase),
    )


def _flag(folder: CheckpointFolder, name: str, *, default: bool) -> bool:
    """An option of tokenizer_config.json; null is as good as absent.

    Raises:
        CheckpointError: it is neither true nor false.
    """
    value = (folder.json(TOKENIZER_CONFIG) or {}).get(name)
    if value is not None and not isinstance(value, bool):
        where = f"{folder.path / TOKENIZER_CONFIG}: {name}"
        raise CheckpointError(f"{where}: true or false is expected, found {value!r}")
    return default if value is None else value


def _strip_accents(folder: CheckpointFolder, default: bool | None) -> bool | None:
    """The same of accents, which null strips where texts are put into lower case."""
    config = folder.json(TOKENIZER_CONFIG) or {}
    if config.get("strip_accents", default) is None:
        return None
    return _flag(folder, "strip_accents", default=bool(default))


def _tokenizer_class(folder: CheckpointFolder) -> str | None:
    """Name the class of `transformers` that would load the tokenizer, as far as it matters."""
    stated = (folder.json(TOKENIZER_CONFIG) or {}).get("tokenizer_class")
    if isinstance(stated, str):
        return stated
    model_type = (folder.json("config.json") or {}).get("model_type")
    if model_type == "mpnet":
        return "MPNetTokenizer"
    return "BertTokenizer" if model_type in _BERT_LIKE else None


def gives_segment_ids(folder: CheckpointFolder) -> bool:
    """Say whether the tokenizer tells which token of a pair is of which text."""
    names = (folder.json(TOKENIZER_CONFIG) or {}).get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return _tokenizer_class(folder) in _SEGMENT_CLASSES


def _build_tokenizer(folder: CheckpointFolder) -> Tokenizer:
    """Build BERT's tokenizer from its vocabulary, for checkpoints from before tokenizer.json."""
    config = folder.json(TOKENIZER_CONFIG) or {}
    model_type = (folder.json("config.json") or {}).get("model_type")
    if not folder.exists("vocab.txt") or model_type not in _BERT_LIKE:
        raise CheckpointError(
            f"{folder.path / TOKENIZER_FILE} is missing. "
            "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` of transformers "
            "writes one."
        )
    names = {name: _token(config, name) for name in ("unk", "sep", "pad", "cls", "mask")}
    vocabulary = _read_vocabulary(folder)
    missing = [names[name] for name in ("unk", "cls", "sep") if names[name] not in vocabulary]
    if missing:
        raise CheckpointError(f"{folder.path / 'vocab.txt'}: {missing[0]} is missing")
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token=names["unk"]))
    tokenizer.add_special_tokens([token for token in names.values() if token in vocabulary])
    tokenizer.normalizer = BertNormalizer(
        clean_text=True,
        handle_chinese_chars=_flag(folder, "tokenize_chinese_chars", default=True),
        strip_accents=_strip_accents(folder, None),
        lowercase=_flag(folder, "do_lower_case", default=True),
    )
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder(prefix="##")
    cls, sep = names["cls"], names["sep"]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (cls, sep)],
    )
    return tokenizer


def _read_vocabulary(folder: CheckpointFolder) -> dict[str, int]:
    try:
        return WordPiece.read_file(str(folder.path / "vocab.txt"))
    # The library raises plain Exception.
    except Exception as error:
        path = folder.path / "vocab.txt"
        raise CheckpointError(f"{path}: not a usable vocabulary: {error}") from error


def _token(config: dict[str, Any], name: str) -> str:
    return token_text(config.get(f"{name}_token")) or f"[{name.upper()}]"


def read_tokenizer_card(folder: CheckpointFolder, *, lowercase: bool = False) -> TokenizerCard:
    """Read the facts beside tokenizer.json: special tokens and chat templates.

    Raises:
        CheckpointError: a file is malformed.
    """
    config = folder.json(TOKENIZER_CONFIG) or {}
    return TokenizerCard(
        special_tokens=special_tokens(folder),
        chat_templates=_chat_templates(folder, config),
        lowercase=lowercase,
        clean_up_spaces=config.get("clean_up_tokenization_spaces") is True,
        split_special=_flag(folder, "split_special_tokens", default=False),
        truncation_side="left" if config.get("truncation_side") == "left" else "right",
    )


def _chat_templates(folder: CheckpointFolder, config: dict[str, Any]) -> dict[str, str]:
    """Collect chat templates; a file of its own wins over tokenizer_config.json."""
    templates = _configured_templates(folder, config.get("chat_template"))
    own_file = folder.text(_TEMPLATE_FILE)
    files = sorted((folder.path / _TEMPLATE_FOLDER).glob("*.jinja"))
    if own_file is None and not files:
        return templates
    named = {path.stem: folder.text(f"{_TEMPLATE_FOLDER}/{path.name}") or "" for path in files}
    return named | ({} if own_file is None else {"default": own_file})


def _configured_templates(folder: CheckpointFolder, value: object) -> dict[str, str]:
    if value is None:
        legacy = (folder.json("chat_template.json") or {}).get("chat_template")
        return {"default": legacy} if isinstance(legacy, str) else {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict) and value and not value.keys() & {"name", "template"}:
        value = [{"name": name, "template": template} for name, template in value.items()]
    entries = value if isinstance(value, list) else [value]
    pairs = [(e.get("name"), e.get("template")) for e in entries if isinstance(e, dict)]
    templates = {n: t for n, t in pairs if isinstance(n, str) and isinstance(t, str)}
    if len(templates) < len(entries):
        raise CheckpointError(
            f"{folder.path / TOKENIZER_CONFIG}: chat_template: a text, texts by name, or a list of "
            f"objects with name and template is expected, found {json.dumps(value)[:80]}"
        )
    return templates
