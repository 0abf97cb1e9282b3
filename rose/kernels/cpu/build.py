"""Compiles the C++ sources once per machine type and keeps the result in the user's cache.

The file's name is a hash of the sources, the compiler and the flags, which name the instruction
sets, so a changed source or another CPU gets a build of its own. A finished build is renamed into
place, so processes that build at once do not disturb each other. A digest beside it guards against
files that were cut short.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
)
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300

# Instruction sets, best first: what the CPU must have, and the flags that use it.
_X86_LEVELS = {
    "avx512": (
        {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"},
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    ),
    "avx2": ({"avx2", "fma"}, ("-mavx2", "-mfma")),
}
LEVELS = (*_X86_LEVELS, "generic")


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


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
    compiler = find_compiler()
    command = [compiler, *FLAGS, *(_X86_LEVELS[level][1] if level in _X86_LEVELS else ())]
    sources = sorted(SOURCES.glob("*.cpp"))
    path = cache_folder() / f"cpu-kernels-{level}-{_key(command)}.so"
    if not _is_whole(path):
        _compile([*command, *map(str, sources)], path)
    return path


def find_compiler() -> str:
    """Return the C++ compiler's path: $CXX, or the first of the usual names.

    Raises:
        BuildError: there is none.
    """
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for name in names:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler ({', '.join(names)}) is on the PATH")


def cache_folder() -> Path:
    """Return where builds are kept: $XDG_CACHE_HOME/rose or ~/.cache/rose."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "rose"


def _key(command: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join((*command, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    """Say whether a build is there as it was written."""
    try:
        expected = _digest_file(path).read_text(encoding="ascii")
        return hashlib.sha256(path.read_bytes()).hexdigest() == expected
    except (OSError, UnicodeDecodeError):
        return False


def _compile(command: Sequence[str], path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            built = Path(folder) / path.name
            _run([*command, "-o", str(built)])
            digest = _digest_file(built)
            digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest(), encoding="ascii")
            built.replace(path)
            digest.replace(_digest_file(path))
    except OSError as error:
        raise BuildError(f"the cache {path.parent} cannot be written: {error}") from error


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {TIMEOUT_S} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else done.returncode}")
