"""Reads a checkpoint folder: its files, and typed settings with where each one came from.

Free of torch, so that a gateway and `rose inspect` can use it.
"""

import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rose.models.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

CONFIG_FILE = "config.json"
MODULES_FILE = "modules.json"

_EXPECTED = (
    "config.json, weights (model.safetensors, or shards with model.safetensors.index.json, or "
    "pytorch_model.bin) and tokenizer.json"
)
_MOST = 2**31 - 1  # what positions and ids, which are int32, can count
_MOST_FLOAT = 2**1023  # whole numbers below are floats
_JSON_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One fact that ROSE read: its name, its value, and which file or default it is from."""

    name: str
    value: Any
    source: str


class CheckpointFolder:
    """The files of a checkpoint. Each JSON file is parsed once."""

    def __init__(self, path: str | Path) -> None:
        """Open the folder of a model.

        Raises:
            CheckpointError: there is no such folder, or it holds no model.
        """
        self.path = Path(path).expanduser()
        self._parsed: dict[str, dict[str, Any] | list[Any] | None] = {}
        if not self.path.is_dir():
            raise CheckpointError(_no_folder(self.path))
        if not self.exists(CONFIG_FILE) and not self.exists(MODULES_FILE):
            raise CheckpointError(
                f"{self.path} holds no model: config.json is missing. "
                f"A model folder has {_EXPECTED}; this one has {self.listing()}."
            )

    def listing(self) -> str:
        """Name the folder's files, for messages."""
        names = sorted(entry.name for entry in self.path.iterdir())
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        return (", ".join(names[:12]) + more) if names else "no files"

    def exists(self, name: str) -> bool:
        """Say whether the folder has a file of this (relative) name.

        Raises:
            CheckpointError: there is something else, such as a folder or a link to nothing.
        """
        file = self.path / name
        try:
            if file.is_file():
                return True
            present = file.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        is_link = stat.S_ISLNK(present.st_mode)
        found = f"a link to nothing ({file.readlink()})" if is_link else "something else"
        raise CheckpointError(f"{file}: a file is expected, found {found}")

    def text(self, name: str) -> str | None:
        """Read a UTF-8 file; None where there is none.

        Raises:
            CheckpointError: the file cannot be read, or is not UTF-8.
        """
        if not self.exists(name):
            return None
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.path / name}: cannot be read: {error}") from error

    def json(self, name: str) -> dict[str, Any] | None:
        """Parse a file that holds a JSON object; None where there is none.

        Raises:
            CheckpointError: malformed JSON, or JSON of another kind.
        """
        value = self._parse(name)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{self.path / name}: a JSON object is expected, found a list")
        return value

    def json_list(self, name: str) -> list[Any] | None:
        """Parse a file that holds a JSON list; None where there is none.

        Raises:
            CheckpointError: malformed JSON, or JSON of another kind.
        """
        value = self._parse(name)
        if value is not None and not isinstance(value, list):
            raise CheckpointError(f"{self.path / name}: a JSON list is expected, found an object")
        return value

    def _parse(self, name: str) -> dict[str, Any] | list[Any] | None:
        if name not in self._parsed:
            text = self.text(name)
            self._parsed[name] = None if text is None else self._decode(name, text)
        return self._parsed[name]

    def _decode(self, name: str, text: str) -> dict[str, Any] | list[Any]:
        try:
            value = json.loads(text)
            if "\\u" in text:
                json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / name}: malformed JSON: {error}") from error
        if not isinstance(value, dict | list):
            found = type(value).__name__
            raise CheckpointError(
                f"{self.path / name}: a JSON object or list is expected, found {found}"
            )
        return value


def _no_folder(path: Path) -> str:
    if path.suffix == ".gguf" and path.is_file():
        return f"{path} is a GGUF file: `rose convert` makes a model folder of it"
    if path.exists():
        return f"{path} is not a folder. A model is a folder with {_EXPECTED}."
    return f"{path} does not exist. A model is a folder with {_EXPECTED}."


class ConfigReader:
    """Typed settings of one JSON object; remembers each with its source. A null means absent."""

    def __init__(
        self, values: "Mapping[str, Any]", file: str, architecture: str, label: str | None = None
    ) -> None:
        """Read `values`, which came from `file`; defaults are those of `architecture`.

        Messages name `file`, settings the shorter `label`, if there is one.
        """
        self.values = dict(values)
        self.file = file
        self.label = label or file
        self.architecture = architecture
        self.settings: list[Setting] = []
        self.warnings: list[str] = []
        self._sources: dict[str, str] = {}

    def override(self, values: "Mapping[str, Any]", source: str) -> None:
        """Let `values` from another place win over the file's."""
        self.values.update(values)
        self._sources.update(dict.fromkeys(values, source))

    def has(self, key: str) -> bool:
        """Say whether the key is there and not null."""
        return self.values.get(key) is not None

    def source(self, key: str) -> str:
        """Name where the value of `key` comes from."""
        return self._sources.get(key, self.label)

    def where(self, key: str) -> str:
        """Name the file and the key, for messages."""
        return f"{self._sources.get(key, self.file)}: {key}"

    def get(self, key: str, default: T, kind: type[T]) -> T:
        """Return the value of `key`, or the architecture's default.

        Raises:
            CheckpointError: the value is of another type.
        """
        value = self.optional(key, kind, record=False)
        if value is None:
            self.record(key, default, f"default of {self.architecture}")
            return default
        self.record(key, value, self.source(key))
        return value

    def optional(self, key: str, kind: type[T], *, record: bool = True) -> T | None:
        """Return the value of `key`, or None where it is absent.

        Raises:
            CheckpointError: the value is of another type.
        """
        value = self.values.get(key)
        if value is None:
            return None
        checked = _check(value, kind, self.where(key))
        if record:
            self.record(key, checked, self.source(key))
        return checked

    def epsilon(self, key: str, default: float) -> float:
        """Return a number that keeps a norm from dividing by zero.

        Raises:
            CheckpointError: the value is not one, or makes the root of a negative number.
        """
        value = self.get(key, default, float)
        if value < 0:
            raise CheckpointError(f"{self.where(key)}: must be at least 0, found {value}")
        return value

    def size(self, key: str, default: int) -> int:
        """Return a positive integer.

        Raises:
            CheckpointError: the value is not one.
        """
        return self._positive(key, self.get(key, default, int))

    def optional_size(self, key: str) -> int | None:
        """Return a positive integer, or None where it is absent."""
        value = self.optional(key, int)
        return None if value is None else self._positive(key, value)

    def _positive(self, key: str, value: int) -> int:
        if value < 1:
            raise CheckpointError(f"{self.where(key)}: must be at least 1, found {value}")
        if value > _MOST:
            raise CheckpointError(f"{self.where(key)}: must be at most {_MOST}, found {value}")
        return value

    def record(self, name: str, value: object, source: str) -> None:
        """Remember a setting that was worked out from others."""
        self.settings.append(Setting(name, value, source))

    def warn(self, message: str) -> None:
        """Remember something that a user should know, once."""
        if message not in self.warnings:
            self.warnings.append(message)


def _check(value: object, kind: type[T], where: str) -> T:
    """Return `value` if it is of `kind`; an integer is a number, true is neither."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < _MOST_FLOAT else math.inf
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        expected = _JSON_NAMES.get(kind, f"a {kind.__name__}")
        raise CheckpointError(f"{where}: {expected} is expected, found {value!r}")
    return cast("T", value)
