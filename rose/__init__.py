"""ROSE: one engine that serves LLMs, embedders and rerankers."""

from importlib import import_module
from typing import TYPE_CHECKING

from rose._version import __version__

if TYPE_CHECKING:
    from rose.runtime.options import SamplingParams
    from rose.serving.local import Engine
    from rose.serving.local_generation import Completion
    from rose.serving.local_ranking import Classified, Ranked

__all__ = ["Classified", "Completion", "Engine", "Ranked", "SamplingParams", "__version__"]

_LAZY = {
    "Classified": "rose.serving.local_ranking",
    "Completion": "rose.serving.local_generation",
    "Engine": "rose.serving.local",
    "Ranked": "rose.serving.local_ranking",
    "SamplingParams": "rose.runtime.options",
}


def __getattr__(name: str) -> object:
    """Import the public classes on first use, so that `import rose` stays free of torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'rose' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
