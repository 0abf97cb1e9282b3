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
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma")
_AVX512_FLAGS = tuple(f"-m{feature}" for feature in _AVX512)
_X86_LEVELS = {
    "avx512vnni": ({*_AVX512, "avx512_vnni"}, (*_AVX512_FLAGS, "-mavx512vnni")),
    "avx512": (set(_AVX512), _AVX512_FLAGS),
    "avx2": ({"avx2", "fma"}, ("-mavx2", "-mfma")),
}
LEVELS = (*_X86_LEVELS, "generic")


def best_level() -> str:
    """Name the best instruction set that this machine has."""
    return available_levels()[0]


def available_levels() -> list[str]:
    """Name the instruction sets that this machine has, best first; of `LEVELS`."""
    features = _cpu_features()
    return [*(level for level, (needed, _) in _X86_LEVELS.items() if needed <= features), "generic"]


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
