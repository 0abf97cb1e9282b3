"""Compiles the CPU kernels for this machine's instruction set, once (`rose.kernels.compiling`)."""

import platform
from pathlib import Path

from rose.kernels.compiling import BuildError, cache_folder, compile_folder, find_compiler

__all__ = ["LEVELS", "BuildError", "best_level", "build", "cache_folder", "find_compiler"]

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
)

# Instruction sets, best first: what the CPU must have, and the flags that use it.
_X86_LEVELS = {
    "avx512": (
        {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"},
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    ),
    "avx2": ({"avx2", "fma"}, ("-mavx2", "-mfma")),
}
LEVELS = (*_X86_LEVELS, "generic")


def best_level() -> str:
    """Name the widest instruction set that this machine has, one of `LEVELS`."""
    features = _cpu_features()
    for level, (needed, _) in _X86_LEVELS.items():
        if needed <= features:
            return level
    return "generic"


def _cpu_features() -> set[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return set()  # what every CPU of such a machine has, the compiler knows
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def build(level: str) -> Path:
    """Return the library for an instruction set, compiled if it is not in the cache.

    Raises:
        BuildError: there is no compiler, it failed, or the cache cannot be written.
    """
    flags = [*FLAGS, *(_X86_LEVELS[level][1] if level in _X86_LEVELS else ())]
    return compile_folder(f"cpu-kernels-{level}", SOURCES, flags)
