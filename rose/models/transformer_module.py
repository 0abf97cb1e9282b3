"""Settings of sentence-transformers' Transformer module, the first of a model. Free of torch."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rose.models.card import ChatTexts
from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError
from rose.models.tokenizer import read_tokenizer_card

# The module's settings; older releases named the file after the architecture.
TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Signs of a template that reads a message's content as a list of parts.
_PARTS = ("content[0]", ".type", "'type'", '"type"', "message.content[")


class Use(NamedTuple):
    """What a model is used for: the module's task, the name of its output, and the model's own.

    A `late` one has settings for queries and documents, which are read elsewhere.
    """

    task: str
    output: str
    method_output: str
    late: bool = False


EMBED = Use("feature-extraction", "token_embeddings", "last_hidden_state")
CLASSIFY = Use("sequence-classification", "scores", "logits")
TOKENS = Use("feature-extraction", "token_embeddings", "last_hidden_state", late=True)
SPARSE = Use("fill-mask", "token_embeddings", "logits")
YES_NO = Use("text-generation", "causal_logits", "logits")


class TransformerModule(NamedTuple):
    """What the settings say beyond lengths: how texts become conversations, and warnings."""

    chat: ChatTexts | None
    warnings: list[str]


def transformer_settings(folder: CheckpointFolder) -> tuple[dict[str, Any], str]:
    """Return the module's settings and the file they are from."""
    for name in TRANSFORMER_CONFIGS:
        settings = folder.json(name)
        if settings:
            return settings, name
    return {}, TRANSFORMER_CONFIGS[0]


def read_transformer_module(folder: CheckpointFolder, use: Use) -> TransformerModule:
    """Read the settings that change the input or the output of the backbone.

    Raises:
        CheckpointError: a setting that ROSE does not follow.
    """
    settings, name = transformer_settings(folder)
    file = str(folder.path / name)
    expected = (("transformer_task", use.task), ("module_output_name", use.output))
    for key, value in expected:
        found = settings.get(key) or value
        if found != value:
            raise CheckpointError(f"{file}: {key}: {found!r} is not supported here, only {value!r}")
    for key in ("query_length", "document_length", "query_expansion"):
        if settings.get(key) is not None and not use.late:
            raise CheckpointError(f"{file}: {key}: it goes with vectors of tokens only")
    modalities = settings.get("modality_config")
    if modalities is not None:
        _check_text(modalities, use, f"{file}: modality_config")
    chat = _read_chat(folder, settings, file)
    if use is CLASSIFY and modalities is None:
        chat = _pair_chat(folder)
    return TransformerModule(
        chat, [f"{file}: {key} is not used" for key in _unread(settings, chat)]
    )


def _unread(settings: Mapping[str, Any], chat: ChatTexts | None) -> list[str]:
    """Name settings that ROSE does not read."""
    unread = ["tokenizer_name_or_path"] if settings.get("tokenizer_name_or_path") else []
    processing = settings.get("processing_kwargs")
    read = {"chat_template"} if chat else set()
    if processing and (not isinstance(processing, dict) or processing.keys() - read):
        unread.append("processing_kwargs")
    return unread


def _check_text(modalities: object, use: Use, where: str) -> None:
    if not isinstance(modalities, dict) or not isinstance(modalities.get("text"), dict):
        raise CheckpointError(f"{where}: an entry for text is expected, found {modalities!r}")
    _check_method(modalities["text"], use, f"{where}: text")
    if "message" in modalities:
        if not isinstance(modalities["message"], dict):
            raise CheckpointError(f"{where}: message: an object is expected")
        _check_method(modalities["message"], use, f"{where}: message")


def _check_method(entry: Mapping[str, Any], use: Use, where: str) -> None:
    output = entry.get("method_output_name", use.method_output)
    if entry.get("method", "forward") != "forward" or output != use.method_output:
        raise CheckpointError(f"{where}: {entry} is not supported")


def _read_chat(
    folder: CheckpointFolder, settings: Mapping[str, Any], file: str
) -> ChatTexts | None:
    """Say whether texts pass through the chat template: an entry for messages means so."""
    modalities, where = settings.get("modality_config") or {}, f"{file}: modality_config: message"
    if "message" not in modalities:
        return None
    template = read_tokenizer_card(folder).chat_templates.get("default")
    if template is None:
        raise CheckpointError(f"{where}: texts pass through a chat template, and there is none")
    form = modalities["message"].get("format", "auto")
    if form not in ("flat", "structured", "auto"):
        raise CheckpointError(f"{where}: format: flat or structured is expected, found {form!r}")
    parts = _reads_parts(template) if form == "auto" else form == "structured"
    processing = settings.get("processing_kwargs")
    variables = processing.get("chat_template") if isinstance(processing, dict) else None
    variables = dict(variables) if isinstance(variables, dict) else {}
    variables.pop("restore_suffix", None)  # says how to cut, which is the gateway's to decide
    return ChatTexts(parts=parts, variables=variables)


def _pair_chat(folder: CheckpointFolder) -> ChatTexts | None:
    """Say whether pairs pass through a chat template that speaks of queries and documents.

    sentence-transformers finds that out where the settings say nothing of messages.
    """
    template = read_tokenizer_card(folder).chat_templates.get("default", "")
    if not all(re.search(rf"""["']{role}["']""", template) for role in ("query", "document")):
        return None
    return ChatTexts(parts=_reads_parts(template))


def _reads_parts(template: str) -> bool:
    return any(sign in template for sign in _PARTS)
