"""Tokens with a role, and tokens that only the files beside tokenizer.json know. Free of torch.

`tokenizer_config.json` alone counts where it lists `added_tokens_decoder`, as it does in newer
checkpoints; `special_tokens_map.json` and `added_tokens.json` are older and count where it does
not. That is the order of `transformers`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError

TOKENIZER_CONFIG = "tokenizer_config.json"
_OLDER_SPECIAL = "special_tokens_map.json"
_OLDER_ADDED = "added_tokens.json"
_LISTED = "added_tokens_decoder"
_ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA = "extra_special_tokens"
_MORE_SPECIAL = ("additional_special_tokens", _EXTRA)  # older and newer name
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def special_tokens(folder: CheckpointFolder) -> dict[str, str]:
    """Return the text of each token with a role, by its key, such as "eos_token".

    Raises:
        CheckpointError: a file is malformed.
    """
    return {key: token.content for key, token in _roles(folder).items()}


def add_tokens(tokenizer: Tokenizer, folder: CheckpointFolder) -> None:
    """Add to a tokenizer what only the files beside tokenizer.json know.

    Raises:
        CheckpointError: a file is malformed.
    """
    config = _config(folder)
    if config.get(_LISTED) is not None:
        for token in _listed(folder, config[_LISTED]):
            _replace(tokenizer, token)
    elif isinstance(older := folder.json(_OLDER_ADDED), dict):
        for token in _older_added(folder, older):
            _add(tokenizer, token)
    for token in (*_roles(folder).values(), *_more_special(folder)):
        _add(tokenizer, token)


def token_text(value: object) -> str | None:
    """Return the text of a token that is saved as text or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _config(folder: CheckpointFolder) -> dict[str, Any]:
    return folder.json(TOKENIZER_CONFIG) or {}


def special_token_sources(folder: CheckpointFolder) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the files that name special tokens, with their values, the one that counts first.

    Raises:
        CheckpointError: a file is malformed.
    """
    config = (TOKENIZER_CONFIG, _config(folder))
    older = (_OLDER_SPECIAL, folder.json(_OLDER_SPECIAL) or {})
    return [older, config] if config[1].get(_LISTED) is None else [config, older]


def _roles(folder: CheckpointFolder) -> dict[str, AddedToken]:
    sources = [values for _, values in special_token_sources(folder)]
    extra = [e for values in sources if isinstance(e := values.get(_EXTRA), dict)]
    sources += extra  # tokens by name, such as "image_token"
    found = {}
    for key in dict.fromkeys((*_ROLES, *(name for names in extra for name in names))):
        named = (_special(source.get(key)) for source in sources)
        token = next((token for token in named if token is not None), None)
        if token is not None:
            found[key] = token
    return found


def _more_special(folder: CheckpointFolder) -> Iterator[AddedToken]:
    for _, source in reversed(special_token_sources(folder)):
        for key in _MORE_SPECIAL:
            value = source.get(key)
            items = list(value.values()) if isinstance(value, dict) else value
            for item in items if isinstance(items, list) else []:
                token = _special(item)
                if token is not None:
                    yield token


def _special(value: object) -> AddedToken | None:
    """Return a special token that is saved as text, or as an object with flags."""
    text = token_text(value)
    if not text:
        return None
    flags = _flags(value) if isinstance(value, dict) else {}
    return AddedToken(text, **(flags | {"special": True}))


def _flags(entry: Mapping[str, Any]) -> dict[str, bool]:
    return {name: bool(entry[name]) for name in _FLAGS if entry.get(name) is not None}


def _listed(folder: CheckpointFolder, listed: object) -> list[AddedToken]:
    """Read tokens by id, in the order of their ids."""
    try:
        if not isinstance(listed, dict):
            raise TypeError(listed)
        entries = sorted((int(id_), entry) for id_, entry in listed.items())
        return [AddedToken(entry["content"], **_flags(entry)) for _, entry in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = f"{folder.path / TOKENIZER_CONFIG}: {_LISTED}"
        raise CheckpointError(f"{where}: tokens by id are expected: {error!r}") from error


def _older_added(folder: CheckpointFolder, older: Mapping[str, Any]) -> list[AddedToken]:
    """Read ids by token, in the order of the ids."""
    for text, id_ in older.items():
        if not isinstance(id_, int) or isinstance(id_, bool):
            where = f"{folder.path / _OLDER_ADDED}: {text}"
            raise CheckpointError(f"{where}: an id is expected, found {id_!r}")
    special = {token.content for token in (*_roles(folder).values(), *_more_special(folder))}
    texts = sorted(older, key=lambda text: older[text])
    return [AddedToken(t, special=t in special, normalized=t not in special) for t in texts]


def _add(tokenizer: Tokenizer, token: AddedToken) -> None:
    """Add a token that is new; the flags of one that is not stay what they are."""
    known = {added.content for added in tokenizer.get_added_tokens_decoder().values()}
    if token.content and token.content not in known:
        tokenizer.add_tokens([token])


def _replace(tokenizer: Tokenizer, token: AddedToken) -> None:
    """Add a token, or let its flags win over those of the same token in tokenizer.json."""
    known = map(repr, tokenizer.get_added_tokens_decoder().values())
    if token.content and repr(token) not in known:
        tokenizer.add_tokens([token])
