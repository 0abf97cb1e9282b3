"""ROSE: one engine that serves LLMs, embedders and rerankers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rose._version import __version__

if TYPE_CHECKING:
    from rose.serving.local import Engine

__all__ = ["Engine", "__version__"]

_LAZY = {"Engine": "rose.serving.local"}


def __getattr__(name: str) -> Any:
    """Import the public classes on first use, so that `import rose` stays free of torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'rose' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
