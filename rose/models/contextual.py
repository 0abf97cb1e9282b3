"""Embedders that were trained on documents in chunks (pplx-embed-context). Free of torch.

The chunks of a document are one text, with the tokenizer's separator between them, and the vector
of a chunk is pooled between two separators. The checkpoint says so by its class alone.
"""

from dataclasses import replace

from rose.models.added_tokens import TOKENIZER_CONFIG
from rose.models.config import CONFIG_FILE, MODULES_FILE, CheckpointFolder, Setting
from rose.models.errors import CheckpointError
from rose.models.recipe import Recipe
from rose.models.tokenizer import TOKENIZER_FILE, read_tokenizer_card

CONTEXTUAL_CLASSES = ("PPLXQwen3ContextualModel",)


def add_separator(core: CheckpointFolder, recipe: Recipe) -> Recipe:
    """Complete the recipe of a model of one of `CONTEXTUAL_CLASSES`; others stay as they are.

    Without modules.json the class's own code pools and quantises: by the mean and by tanh.

    Raises:
        CheckpointError: the tokenizer has no separator.
    """
    names = (core.json(CONFIG_FILE) or {}).get("architectures")
    listed = names if isinstance(names, list) else []
    found = [name for name in map(str, listed) if name in CONTEXTUAL_CLASSES]
    if not found:
        return recipe
    separator = _separator_id(core)
    settings = (*recipe.settings, Setting("chunk separator", separator, TOKENIZER_CONFIG))
    recipe = replace(recipe, chunk_separator=separator, settings=settings)
    if core.exists(MODULES_FILE):
        return recipe
    source = f"{CONFIG_FILE}: architectures: {found[0]}"
    own = {"pooling": "mean", "normalize": False, "quantizer": "tanh"}
    settings = (
        *(setting for setting in settings if setting.name not in own),
        *(Setting(name, value, source) for name, value in own.items()),
    )
    pooling = replace(recipe.pooling, modes=("mean",))
    return replace(recipe, pooling=pooling, quantizer="tanh", settings=settings, warnings=())


def _separator_id(core: CheckpointFolder) -> int:
    text = read_tokenizer_card(core).special_tokens.get("sep_token")
    if text is None:
        raise CheckpointError(
            f"{core.path / TOKENIZER_CONFIG}: sep_token is missing: it separates chunks"
        )
    added = (core.json(TOKENIZER_FILE) or {}).get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text:
            identity = token.get("id")
            if isinstance(identity, int) and not isinstance(identity, bool) and identity >= 0:
                return identity
    raise CheckpointError(
        f"{core.path / TOKENIZER_FILE}: added_tokens: there is no {text!r}, the sep_token"
    )
