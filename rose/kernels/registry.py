"""Lazy registries: a name stands for "module:attribute" and is imported when it is asked for."""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

T = TypeVar("T")


class UnknownNameError(ValueError):
    """A name that no entry of a registry has; the message lists the names that exist."""


class Registry(Generic[T]):
    """Maps names to objects of one kind without importing them before they are needed."""

    def __init__(self, kind: str, targets: "Mapping[str, str]") -> None:
        """Make a registry of `kind` (used in errors) from name -> "module:attribute"."""
        self.kind = kind
        self._targets = dict(targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> "Iterator[str]":
        return iter(sorted(self._targets))

    def register(self, name: str, target: str) -> None:
        """Add `name` -> "module:attribute".

        Raises:
            ValueError: the name is taken, or the target has another form.
        """
        if name in self._targets:
            raise ValueError(f"{self.kind} {name!r} is registered already: {self._targets[name]}")
        if target.count(":") != 1:
            raise ValueError(
                f"{self.kind} {name!r}: {target!r} is not of the form module:attribute"
            )
        self._targets[name] = target

    def load(self, name: str) -> T:
        """Import and return what `name` stands for.

        Raises:
            UnknownNameError: no entry has this name.
        """
        if name not in self._targets:
            raise UnknownNameError(self._unknown(name))
        module, _, attribute = self._targets[name].partition(":")
        return cast("T", getattr(import_module(module), attribute))

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, self._targets, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"unknown {self.kind} {name!r}.{hint} Known: {', '.join(self)}."
