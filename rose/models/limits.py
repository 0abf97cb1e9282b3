"""How many tokens a text may have. Free of torch.

The order is that of sentence-transformers: the command line, then `max_seq_length` of the
Transformer module's settings if it is a number, else the smaller of the tokenizer's
`model_max_length` and the position table. A truncation baked into tokenizer.json has no say.
"""

from collections.abc import Mapping
from typing import Any

from rose.models.architecture import ModelConfig
from rose.models.config import CONFIG_FILE, CheckpointFolder, Setting
from rose.models.errors import CheckpointError
from rose.models.recipe import TRANSFORMER_CONFIGS

# transformers writes 1e30 for "no limit"; whatever is above this is no limit either.
_NO_LIMIT = 10**12


def transformer_settings(folder: CheckpointFolder) -> tuple[dict[str, Any], str]:
    """Return the Transformer module's settings and the file they are from."""
    for name in TRANSFORMER_CONFIGS:
        settings = folder.json(name)
        if settings:
            return settings, name
    return {}, TRANSFORMER_CONFIGS[0]


def check_transformer_settings(settings: Mapping[str, Any], file: str) -> list[str]:
    """Refuse what would change the input or the output of the backbone; return warnings.

    Raises:
        CheckpointError: a setting that ROSE does not follow.
    """
    task = settings.get("transformer_task") or "feature-extraction"
    if task != "feature-extraction":
        raise CheckpointError(f"{file}: transformer_task: {task!r} is not supported")
    output = settings.get("module_output_name") or "token_embeddings"
    if output != "token_embeddings":
        raise CheckpointError(f"{file}: module_output_name: {output!r} is not supported")
    _check_modalities(settings.get("modality_config"), file)
    for key in ("query_length", "document_length", "query_expansion"):
        if settings.get(key) is not None:
            raise CheckpointError(f"{file}: {key}: multi-vector models are not supported")
    unread = [key for key in ("processing_kwargs", "tokenizer_name_or_path") if settings.get(key)]
    return [f"{file}: {key} is not used" for key in unread]


def _check_modalities(modalities: object, file: str) -> None:
    if modalities is None:
        return
    where = f"{file}: modality_config"
    if not isinstance(modalities, dict) or not isinstance(modalities.get("text"), dict):
        raise CheckpointError(f"{where}: an entry for text is expected, found {modalities!r}")
    if "message" in modalities:
        raise CheckpointError(
            f"{where}: texts of this model pass through its chat template, which is not supported "
            "for embeddings; without the entry 'message' they are embedded as they are"
        )
    output = modalities["text"].get("method_output_name", "last_hidden_state")
    if modalities["text"].get("method", "forward") != "forward" or output != "last_hidden_state":
        raise CheckpointError(f"{where}: text: {modalities['text']} is not supported")


def max_length(
    folder: CheckpointFolder, config: ModelConfig, option: int | None, *, embeds: bool
) -> tuple[Setting, list[str]]:
    """Choose the maximum length, with its source and any warnings.

    Args:
        folder: the folder of the backbone.
        config: the architecture's config.
        option: `--max-model-len`.
        embeds: whether the settings of sentence-transformers and of the tokenizer apply; a
            language model is limited by its positions alone.

    Raises:
        CheckpointError: a limit in a file is malformed.
    """
    setting = _wanted(folder, config, option, embeds=embeds)
    if setting.value <= config.max_positions:
        return setting, []
    if not config.learned_positions:
        return setting, [
            f"max_model_len {setting.value} ({setting.source}) is more than the "
            f"{config.max_positions} positions that the model was made for"
        ]
    clamped = Setting(setting.name, config.max_positions, f"position table of {CONFIG_FILE}")
    if setting.value == config.stated_positions and option is None:
        return clamped, []  # nobody asked for more, the table's first rows are just not usable
    return clamped, [
        f"max_model_len {setting.value} ({setting.source}) is more than the position table "
        f"holds: {config.max_positions} it is"
    ]


def _wanted(
    folder: CheckpointFolder, config: ModelConfig, option: int | None, *, embeds: bool
) -> Setting:
    name = "max_model_len"
    if option is not None:
        if option < 1:
            raise CheckpointError(f"max_model_len must be at least 1, found {option}")
        return Setting(name, option, "option --max-model-len")
    positions = Setting(name, config.stated_positions, CONFIG_FILE)
    if not embeds:
        return positions
    settings, file = transformer_settings(folder)
    processor = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    for source in (processor.get("model_max_length"), settings.get("max_seq_length")):
        stated = _limit(source, f"{folder.path / file}: max_seq_length")
        if stated is not None:
            return Setting(name, stated, file)
    tokenizer = folder.json("tokenizer_config.json") or {}
    key = "model_max_length" if "model_max_length" in tokenizer else "max_len"
    length = _limit(tokenizer.get(key), f"{folder.path / 'tokenizer_config.json'}: {key}")
    if length is not None and length < positions.value:
        return Setting(name, length, "tokenizer_config.json")
    return positions


def _limit(value: object, where: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 1:
        raise CheckpointError(f"{where}: a positive number is expected, found {value!r}")
    return None if value > _NO_LIMIT else int(value)
