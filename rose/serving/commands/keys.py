"""API keys: from the command line, the environment or a file, and what none of them may hold."""

import os
from collections.abc import Sequence
from pathlib import Path

from rose.serving.process import KEYS_VARIABLE


def read_keys(given: Sequence[str] | None, file: Path | None) -> tuple[str, ...]:
    """Return the keys of `--api-key` (or the environment) and of `--api-key-file`.

    A key that is empty, as by a variable that is not set, would leave the door open.

    Raises:
        ValueError: a key is empty or has a blank in it, or the file has none.
        OSError: the file cannot be read.
    """
    if not given and os.environ.get(KEYS_VARIABLE, "x").strip() == "":
        raise ValueError(f"{KEYS_VARIABLE} is set and empty; unset it to let everybody in")
    keys = [_checked(key, "--api-key") for key in given or ()]
    if file is not None:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
        found = [_checked(key, f"{file}") for key in lines if key and not key.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file: {file} has no key")
        keys += found
    return tuple(dict.fromkeys(keys))


def _checked(key: str, source: str) -> str:
    if not key:
        raise ValueError(f"{source}: a key is empty; leave the option out to let everybody in")
    if len(key.split()) != 1 or key != key.strip() or not key.isprintable():
        raise ValueError(f"{source}: a key has a blank or a control character in it")
    return key
