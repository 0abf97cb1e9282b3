"""The folder of a process tree's sockets: private, and swept away when its owner is gone.

The owner holds a lock on a file in the folder. The kernel lets go of it when the process ends,
however it ends, so a folder whose lock is free belongs to nobody.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

PREFIX = "rose-"
OWNER = "owner"


class SocketFolder:
    """A private folder among the system's temporary files; it exists while the block runs."""

    def __init__(self) -> None:
        """Prepare; entering makes it."""
        self.path = Path()
        self._lock: int | None = None

    def __enter__(self) -> "SocketFolder":
        """Make the folder, and remove those whose owners are gone."""
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._own()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._let_go()

    def restore(self) -> bool:
        """Make the folder again if somebody removed it or its lock; say whether that was so.

        Raises:
            OSError: it cannot be made.
        """
        if (self.path / OWNER).exists():
            return False
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._let_go()
        self._own()
        return True

    def _own(self) -> None:
        """Lock the folder: under another name first, or a sweep could find it without a lock."""
        hidden = self.path / f".{OWNER}"
        self._lock = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: it is never swept
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(self.path / OWNER)

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep() -> list[Path]:
    """Remove this user's folders whose owners are gone, and return them."""
    swept = []
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError), _locked(file):
            shutil.rmtree(file.parent)
            swept.append(file.parent)
    return swept


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Take the lock of a folder.

    Raises:
        OSError: somebody has it, or it is another user's.
    """
    if file.parent.is_symlink() or file.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{file.parent} belongs to another user")
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
