"""Compiles C++ sources once and keeps the result in the user's cache. Free of torch.

The file's name is a hash of the sources, the compiler and the flags, so a changed source gets a
build of its own. A finished build is renamed into place, so processes that build at once do not
disturb each other. A digest beside it guards against files that were cut short.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300


class BuildError(Exception):
    """Nothing can be compiled here; the message says why."""


def compile_folder(name: str, folder: Path, flags: Sequence[str]) -> Path:
    """Return the library of a folder's sources, compiled if it is not in the cache.

    Args:
        name: What its file's name starts with.
        folder: Holds the .cpp files and what they include, and nothing else.
        flags: Of the compiler.

    Raises:
        BuildError: there is no compiler, it failed, or the cache cannot be written.
    """
    command = [find_compiler(), *flags]
    path = cache_folder() / f"{name}-{_key(command, folder)}.so"
    if not _is_whole(path):
        _compile([*command, *map(str, sorted(folder.glob("*.cpp")))], path)
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
    """Return where builds are kept: $XDG_CACHE_HOME/rose or ~/.cache/rose.

    Raises:
        BuildError: the user has no home folder, as in some containers.
    """
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "rose"
    try:
        return Path.home() / ".cache" / "rose"
    except RuntimeError as error:
        raise BuildError(f"there is no folder to keep a build in: {error}") from error


def _key(command: Sequence[str], folder: Path) -> str:
    digest = hashlib.sha256("\0".join((*command, platform.machine())).encode())
    for source in sorted(folder.iterdir()):
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
