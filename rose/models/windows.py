"""Which layers of a decoder see a window only, and how wide it is. Free of torch."""

from typing import NamedTuple

from rose.models.config import ConfigReader
from rose.models.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"


class Windows(NamedTuple):
    """One type per layer, and the size that the config gives windows (None without any)."""

    layer_types: tuple[str, ...]
    size: int | None


def no_windows(reader: ConfigReader, layers: int) -> Windows:
    """Every layer sees everything (Llama)."""
    stated = _stated_types(reader, layers)
    if stated is not None and SLIDING in stated:
        raise CheckpointError(
            f"{reader.file}: layer_types: {reader.architecture} has no sliding windows"
        )
    return Windows((FULL,) * layers, None)


def windows_on_request(reader: ConfigReader, layers: int) -> Windows:
    """`use_sliding_window` turns windows on, from layer `max_window_layers` on (Qwen2, Qwen3)."""
    types = _stated_types(reader, layers)
    wanted = reader.get("use_sliding_window", False, bool)
    if types is None:
        is_null = "sliding_window" in reader.values and not reader.has("sliding_window")
        if not wanted or is_null:  # here a null says that there is no window
            return Windows((FULL,) * layers, None)
        first = reader.get("max_window_layers", 28, int)
        types = tuple(SLIDING if index >= first else FULL for index in range(layers))
    if SLIDING not in types:
        return Windows(types, None)
    if not wanted:
        raise CheckpointError(
            f"{reader.file}: layer_types has sliding layers, but use_sliding_window is not true"
        )
    return Windows(types, reader.size("sliding_window", 4096))


def windows_everywhere(default: int | None, reader: ConfigReader, layers: int) -> Windows:
    """A window for all layers if `sliding_window` is a number (Mistral, Phi-3)."""
    types = _stated_types(reader, layers)
    size = reader.optional_size("sliding_window")
    if "sliding_window" not in reader.values and default is not None:
        size = reader.size("sliding_window", default)
    expected = (FULL if size is None else SLIDING,) * layers
    if types not in (None, expected):
        raise CheckpointError(
            f"{reader.file}: layer_types: {reader.architecture} has one type of layers, "
            f"{expected[0]!r} by its sliding_window"
        )
    return Windows(expected, size)


def windows_between(every: int, reader: ConfigReader, layers: int) -> Windows:
    """Every so many layers one sees everything, the others have a window (Gemma)."""
    types = _stated_types(reader, layers)
    if types is None:
        every = reader.size("sliding_window_pattern", every)
        types = tuple(SLIDING if (index + 1) % every else FULL for index in range(layers))
    return Windows(types, reader.size("sliding_window", 4096) if SLIDING in types else None)


def _stated_types(reader: ConfigReader, layers: int) -> tuple[str, ...] | None:
    stated = reader.optional("layer_types", list)
    if stated is None:
        return None
    if len(stated) < layers or not all(kind in (FULL, SLIDING) for kind in stated):
        raise CheckpointError(
            f"{reader.file}: layer_types: one of {FULL!r} and {SLIDING!r} for each of {layers} "
            f"layers is expected, found {stated}"
        )
    return tuple(stated[:layers])
