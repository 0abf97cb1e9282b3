"""The compiled kernels as functions of data pointers, loaded once per process."""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rose.kernels.cpu.build import LEVELS, BuildError, best_level, build

log = logging.getLogger(__name__)

SWITCH, LEVEL_SWITCH = "ROSE_CPU_KERNELS", "ROSE_CPU_LEVEL"

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_FLOAT = ctypes.c_float

Function = Callable[..., int]


class LinearStruct(ctypes.Structure):
    """`RoseLinear` of api.h."""

    _fields_ = (
        ("panels", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("inputs", _SIZE),
        ("outputs", _SIZE),
        ("activation", _INT),
        ("gated", _INT),
        ("storage", _INT),
    )


class AttentionStruct(ctypes.Structure):
    """`RoseAttention` of api.h."""

    _fields_ = (
        ("num_heads", _SIZE),
        ("num_kv_heads", _SIZE),
        ("head_dim", _SIZE),
        ("left", _SIZE),
        ("right", _SIZE),
        ("bias", _POINTER),
        ("bias_center", _SIZE),
        ("bias_width", _SIZE),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
    )


class HeadsStruct(ctypes.Structure):
    """`RoseHeads` of api.h."""

    _fields_ = (
        ("num_heads", _SIZE),
        ("num_kv_heads", _SIZE),
        ("head_dim", _SIZE),
        ("rotary", _SIZE),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("norm_offset", _FLOAT),
        ("eps", _FLOAT),
    )


class SequencesStruct(ctypes.Structure):
    """`RoseSequences` of api.h."""

    _fields_ = (
        ("count", _SIZE),
        ("query_starts", _POINTER),
        ("query_lens", _POINTER),
        ("kv_lens", _POINTER),
        ("block_table", _POINTER),
        ("table_stride", _SIZE),
        ("page_size", _INT),
    )


class SelfAttentionStruct(ctypes.Structure):
    """`RoseSelfAttention` of api.h."""

    _fields_ = (("qkv", _POINTER), ("output", _POINTER), ("heads", _POINTER), ("spec", _POINTER))


class BatchStruct(ctypes.Structure):
    """`RoseBatch` of api.h."""

    _fields_ = (
        ("rows", _SIZE),
        ("sequences", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("slots", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("threads", _INT),
    )


class DecoderLayerStruct(ctypes.Structure):
    """`RoseDecoderLayer` of api.h."""

    _fields_ = (
        ("attention", SelfAttentionStruct),
        ("up", _POINTER),
        ("down", _POINTER),
        ("attention_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("norm_offset", _FLOAT),
        ("eps", _FLOAT),
    )


class EncoderLayerStruct(ctypes.Structure):
    """`RoseEncoderLayer` of api.h."""

    _fields_ = (
        ("attention", SelfAttentionStruct),
        ("up", _POINTER),
        ("down", _POINTER),
        ("attention_norm", _POINTER),
        ("attention_bias", _POINTER),
        ("mlp_norm", _POINTER),
        ("mlp_bias", _POINTER),
        ("eps", _FLOAT),
    )


# Name, result and arguments of the functions that api.h declares.
_FUNCTIONS: dict[str, tuple[type[Any] | None, tuple[Any, ...]]] = {
    "num_panels": (_SIZE, (_SIZE, _INT)),
    "panel_width": (_SIZE, ()),
    "group_size": (_SIZE, ()),
    "fit_halves": (_INT, (_POINTER, _SIZE)),
    "panel_bytes": (_SIZE, (_POINTER,)),
    "pack": (None, (_POINTER, _POINTER, _POINTER, _INT)),
    "pack_codes": (None, (*[_POINTER] * 5, _INT)),
    "linear": (None, (_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _INT)),
    "panel_rows": (None, (_POINTER, _POINTER, _POINTER, _SIZE, _INT)),
    "layer_norm": (None, (*[_POINTER] * 6, _SIZE, _SIZE, _FLOAT, _INT)),
    "rms_norm": (None, (*[_POINTER] * 3, _FLOAT, *[_POINTER] * 2, _SIZE, _SIZE, _FLOAT, _INT)),
    "norm_and_rotate": (
        None,
        (_POINTER, *([_POINTER, _SIZE] * 3), *([_POINTER] * 6), _SIZE, _INT),
    ),
    "embed_and_norm": (None, (*([_POINTER] * 9), _SIZE, _SIZE, _FLOAT, _INT)),
    "pool": (None, (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _SIZE, _SIZE, _SIZE, _INT)),
    "decoder_layer": (None, (_POINTER,) * 6),
    "encoder_layer": (None, (_POINTER,) * 4),
    "attend": (None, (_POINTER, _POINTER, *[_POINTER, _SIZE] * 3, _POINTER, _INT)),
    "store_rows": (
        None,
        (*[_POINTER, _SIZE] * 2, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _INT),
    ),
}


class CpuLibrary:
    """The functions of api.h, without their prefix. Calls release the GIL."""

    num_panels: Function
    panel_width: Function
    group_size: Function
    fit_halves: Function
    panel_bytes: Function
    pack: Function
    pack_codes: Function
    linear: Function
    panel_rows: Function
    layer_norm: Function
    rms_norm: Function
    norm_and_rotate: Function
    embed_and_norm: Function
    pool: Function
    decoder_layer: Function
    encoder_layer: Function
    attend: Function
    store_rows: Function

    def __init__(self, path: Path) -> None:
        """Open the library at `path`.

        Raises:
            OSError: it is no library that can be opened here.
        """
        self.path = path
        opened = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = opened[f"rose_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


_lock = threading.Lock()
_loaded: list[CpuLibrary | None] = []  # what was loaded, or empty before


def load_library() -> CpuLibrary | None:
    """Return the kernels of this machine, built at first use; None where torch ops serve.

    They do where ROSE_CPU_KERNELS is "off" and where no kernels can be built, which is logged.
    ROSE_CPU_LEVEL names an instruction set below the machine's best. Both are read once.

    Raises:
        ValueError: one of these environment variables has an unknown value.
    """
    if not _loaded:
        with _lock:
            if not _loaded:
                _loaded.append(_load(os.environ.get(SWITCH, "on"), os.environ.get(LEVEL_SWITCH)))
    return _loaded[0]


@contextmanager
def replaced(library: CpuLibrary | None) -> Iterator[None]:
    """Let `load_library` return something else meanwhile; for tests and comparisons."""
    before = _loaded.copy()
    _loaded[:] = [library]
    try:
        yield
    finally:
        _loaded[:] = before


def _load(switch: str, level: str | None) -> CpuLibrary | None:
    if switch not in ("on", "off"):
        raise ValueError(f"{SWITCH}={switch!r} is neither on nor off")
    if level is not None and level not in LEVELS:
        raise ValueError(f"{LEVEL_SWITCH}={level!r} is unknown. Known: {', '.join(LEVELS)}.")
    if switch == "off":
        return None
    try:
        library = CpuLibrary(build(level or best_level()))
    except (BuildError, OSError, AttributeError) as error:
        log.info("CPU kernels: torch ops are used, because %s", error)
        return None
    log.info("CPU kernels: %s", library.path.name)
    return library
