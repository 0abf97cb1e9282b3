"""What every job on a file does: look at its output first, know its model again, stop well."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from rose.models.plan import Plan, fingerprint
from rose.serving.inspect import module_weights
from rose.serving.offline.errors import OutputError, StoppedError
from rose.serving.offline.partial import Partial
from rose.serving.offline.wording import counted


def check_output(path: Path, *, force: bool) -> None:
    """Check that an output can be written.

    Raises:
        OutputError: it cannot, or it would replace a file without `force`.
    """
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise OutputError(f"{path} is a folder")
    if path.exists() and not force:
        raise OutputError(f"{path} exists already; --force replaces it")


def choose_device(name: str) -> str:
    """Return the device to use, as `rose.runtime.build` does."""
    from rose.runtime.build import choose_device  # imports torch: only after the quick checks

    return choose_device(name)


@contextlib.contextmanager
def resumable(partial: Partial) -> Iterator[None]:
    """Say at Ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        partial.reload()  # it may have come between a chunk and its count
        if not partial.chunks:
            raise StoppedError("stopped before a first part was done: nothing is kept") from None
        raise StoppedError(
            f"stopped: {counted(partial.rows, 'text is', 'texts are')} done and kept in "
            f"{partial.folder}; "
            "the same command goes on from there"
        ) from None


def digest_model(plan: Plan) -> str:
    """Hash the model's small files and all bytes of its weights, wherever they lie."""
    digest = hashlib.sha256(fingerprint(plan, {}).encode())
    for files in (plan.files, *module_weights(plan)):
        for path in files.paths:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
