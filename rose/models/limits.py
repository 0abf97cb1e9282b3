"""How many tokens a text may have. Free of torch.

The order is that of sentence-transformers: the command line, then `max_seq_length` of the
Transformer module's settings if it is a number, else the smaller of the tokenizer's
`model_max_length` and the position table. A truncation baked into tokenizer.json has no say.
"""

from rose.models.architecture import ModelConfig
from rose.models.config import CONFIG_FILE, CheckpointFolder, Setting
from rose.models.errors import CheckpointError
from rose.models.transformer_module import transformer_settings

# transformers writes 1e30 for "no limit"; whatever is above this is no limit either.
_NO_LIMIT = 10**12


def max_length(
    folder: CheckpointFolder,
    config: ModelConfig,
    option: int | None,
    tasks: tuple[str, ...],
    stated: Setting | None = None,
) -> tuple[Setting, list[str]]:
    """Choose the maximum length, with its source and any warnings.

    Args:
        folder: the folder of the backbone.
        config: the architecture's config.
        option: `--max-model-len`.
        tasks: what the model is served for. A model that only generates is limited by its positions
            alone, others by the settings of sentence-transformers and of the tokenizer too.
        stated: what the checkpoint says elsewhere, which goes before these settings.

    Raises:
        CheckpointError: a limit in a file is malformed, or the option asks for the impossible.
    """
    if stated is not None and option is None:
        setting = stated
    else:
        setting = _wanted(folder, config, option, embeds=tasks != ("generate",))
    if "generate" in tasks and config.cached_positions is not None:
        return _cacheable(setting, config.cached_positions, option)
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


def _cacheable(setting: Setting, most: int, option: int | None) -> tuple[Setting, list[str]]:
    """Keep to lengths at which the keys of a sequence stay as they are.

    Raises:
        CheckpointError: the option asks for more.
    """
    if setting.value <= most:
        return setting, []
    why = (
        f"the rotation of keys changes when a sequence grows beyond {most} tokens, so text can be "
        "generated up to there"
    )
    if option is not None:
        raise CheckpointError(f"max_model_len {option} ({setting.source}): {why}")
    return Setting(setting.name, most, "rope"), [f"max_model_len is {most}: {why}"]


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
