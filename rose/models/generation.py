"""What a checkpoint says about generating text. Free of torch."""

import math
from typing import Any, TypeVar

from rose.models.card import GenerationCard
from rose.models.config import CONFIG_FILE, CheckpointFolder, ConfigReader
from rose.models.errors import CheckpointError

N = TypeVar("N", int, float)

GENERATION_CONFIG = "generation_config.json"

# Beyond these, numbers that requests fall back to would make every answer fail.
_RANGES = {
    "temperature": (0.0, math.inf),
    "top_k": (-1, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),  # as in requests
}
SAMPLING = tuple(_RANGES)


def read_generation_card(folder: CheckpointFolder) -> GenerationCard:
    """Read the end tokens and the sampling defaults; generation_config.json wins over config.json.

    `do_sample: false` is a temperature of 0.

    Raises:
        CheckpointError: a value is malformed or out of range.
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
        temperature=0.0 if is_greedy else _number(reader, "temperature", float),
        top_k=_number(reader, "top_k", int),
        top_p=_number(reader, "top_p", float),
        min_p=_number(reader, "min_p", float),
        repetition_penalty=_number(reader, "repetition_penalty", float),
    )


def _number(reader: ConfigReader, key: str, kind: type[N]) -> N | None:
    value = reader.optional(key, kind)
    least, most = _RANGES[key]
    if value is not None and not least <= value <= most:
        bound = f"at most {most:g}" if value > most else f"at least {least:g}"
        raise CheckpointError(f"{reader.where(key)}: must be {bound}, found {value}")
    return value


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
