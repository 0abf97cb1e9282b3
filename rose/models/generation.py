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
    "min_new_tokens": (0, math.inf),
}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
BAN = -100.0  # as a bias, it bans a token
_LARGEST = 3.4e38  # that float32 holds

# What ROSE does not do, and would change the output; with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "begin_suppress_tokens": (),
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": (),
    "forced_eos_token_id": (),
    "guidance_scale": (0, 1),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (0, 1),
    "num_beams": (0, 1),
    "num_return_sequences": (0, 1),
    "penalty_alpha": (0,),
    "renormalize_logits": (False,),
    "stop_strings": ("",),
    "token_healing": (False,),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}

# What config.json may say where there is no generation_config.json.
_OLDER = (*_RANGES, "suppress_tokens", "bad_words_ids", "sequence_bias")


def read_generation_card(folder: CheckpointFolder) -> GenerationCard:
    """Read the end tokens and the sampling defaults; generation_config.json wins over config.json.

    Checkpoints from before generation_config.json have the defaults in config.json.
    `do_sample: false` is a temperature of 0. `suppress_tokens`, and the rows of `bad_words_ids` and
    of `sequence_bias` that are a single token, are a `logit_bias`.

    Raises:
        CheckpointError: a value is malformed or out of range.
    """
    own, file = generation_settings(folder)
    config = folder.json(CONFIG_FILE) or {}
    if isinstance(text := config.get("text_config"), dict):  # of a model that sees too
        config = text | {key: value for key, value in config.items() if value is not None}
    reader = ConfigReader(own, str(folder.path / file), "generation", file)
    is_greedy = reader.optional("do_sample", bool) is False
    ends = _token_ids(folder, own, config, "eos_token_id")
    return GenerationCard(
        eos_token_ids=ends,
        bos_token_id=next(iter(_token_ids(folder, own, config, "bos_token_id")), None),
        temperature=0.0 if is_greedy else _number(reader, "temperature", float),
        top_k=_number(reader, "top_k", int),
        top_p=_number(reader, "top_p", float),
        min_p=_number(reader, "min_p", float),
        repetition_penalty=_number(reader, "repetition_penalty", float),
        logit_bias=_logit_bias(reader, ends),
        min_tokens=_number(reader, "min_new_tokens", int) or 0,
    )


def generation_warnings(folder: CheckpointFolder) -> list[str]:
    """Name what the checkpoint asks for and ROSE leaves out: one warning, or none."""
    own, file = generation_settings(folder)
    reader = ConfigReader(own, str(folder.path / file), "generation", file)
    names = [key for key, neutral in _UNSUPPORTED.items() if _asks(own.get(key), neutral)]
    rows = {
        "bad_words_ids": _bad_words(reader),
        "sequence_bias": [ids for ids, _ in _sequence_bias(reader)],
    }
    names += [f"{key} of several tokens" for key, of in rows.items() if any(len(i) > 1 for i in of)]
    if not names:
        return []
    listed = ", ".join(names)
    return [f"{file} asks for what is not supported and left out: {listed}"]


def generation_settings(folder: CheckpointFolder) -> tuple[dict[str, Any], str]:
    """Return the settings of generation, and the file that has them.

    `do_sample` of config.json is left out: false is what older releases wrote for "not said".
    """
    own = folder.json(GENERATION_CONFIG)
    if own is not None:
        return own, GENERATION_CONFIG
    config = folder.json(CONFIG_FILE) or {}
    return {key: config[key] for key in (*_OLDER, *_UNSUPPORTED) if key in config}, CONFIG_FILE


def _asks(value: object, neutral: tuple[object, ...]) -> bool:
    return value is not None and value not in ([], {}) and value not in neutral


def _logit_bias(reader: ConfigReader, ends: tuple[int, ...]) -> dict[int, float]:
    """Read what is added to single tokens; bad words never ban an end token."""
    bias = {ids[0]: value for ids, value in _sequence_bias(reader) if len(ids) == 1}
    bad = [ids[0] for ids in _bad_words(reader) if len(ids) == 1 and ids[0] not in ends]
    suppressed = _ids(reader, "suppress_tokens", reader.values.get("suppress_tokens") or [])
    return bias | dict.fromkeys([*bad, *suppressed], BAN)


def _bad_words(reader: ConfigReader) -> list[list[int]]:
    key = "bad_words_ids"
    return [_ids(reader, key, row) for row in reader.optional(key, list) or []]


def _sequence_bias(reader: ConfigReader) -> list[tuple[list[int], float]]:
    """Read rows of token ids, each with what is added to its last token."""
    key, found = "sequence_bias", []
    for row in reader.optional(key, list) or []:
        if not (isinstance(row, list) and len(row) == 2 and _is_bias(row[1])):
            expected = "[token ids, a finite number]"
            raise CheckpointError(f"{reader.where(key)}: {expected} is expected, found {row!r}")
        found.append((_ids(reader, key, row[0]), float(max(BAN, row[1]))))
    return found


def _is_bias(value: object) -> bool:
    """Say whether a value can be added to a logit; what is very small bans it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= _LARGEST


def _ids(reader: ConfigReader, key: str, value: object) -> list[int]:
    if not isinstance(value, list) or not all(map(_is_id, value)):
        raise CheckpointError(
            f"{reader.where(key)}: a list of token ids is expected, found {value!r}"
        )
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
        if not all(map(_is_id, ids)):
            raise CheckpointError(
                f"{folder.path / name}: {key}: a token id or a list of them is expected, "
                f"found {value!r}"
            )
        return tuple(ids)
    return ()
