"""What a checkpoint says about generating text. Free of torch."""

from typing import Any

from rose.models.card import GenerationCard
from rose.models.config import CONFIG_FILE, CheckpointFolder, ConfigReader
from rose.models.errors import CheckpointError

GENERATION_CONFIG = "generation_config.json"


def read_generation_card(folder: CheckpointFolder) -> GenerationCard:
    """Read the end tokens and the sampling defaults; generation_config.json wins over config.json.

    `do_sample: false` is a temperature of 0.

    Raises:
        CheckpointError: a value is malformed.
    """
    own = folder.json(GENERATION_CONFIG) or {}
    config = folder.json(CONFIG_FILE) or {}
    if isinstance(text := config.get("text_config"), dict):  # of a model that sees too
        config = text | {key: value for key, value in config.items() if value is not None}
    reader = ConfigReader(own, str(folder.path / GENERATION_CONFIG), "generation")
    is_greedy = reader.optional("do_sample", bool) is False
    return GenerationCard(
        eos_token_ids=_token_ids(folder, own, config, "eos_token_id"),
        bos_token_id=next(iter(_token_ids(folder, own, config, "bos_token_id")), None),
        temperature=0.0 if is_greedy else reader.optional("temperature", float),
        top_k=reader.optional("top_k", int),
        top_p=reader.optional("top_p", float),
        min_p=reader.optional("min_p", float),
        repetition_penalty=reader.optional("repetition_penalty", float),
    )


def _token_ids(
    folder: CheckpointFolder, own: dict[str, Any], config: dict[str, Any], key: str
) -> tuple[int, ...]:
    for values, name in ((own, GENERATION_CONFIG), (config, CONFIG_FILE)):
        value = values.get(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(
                f"{folder.path / name}: {key}: a token id or a list of them is expected, "
                f"found {value!r}"
            )
        return tuple(ids)
    return ()
