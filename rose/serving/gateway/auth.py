"""Bearer keys."""

import hashlib
import hmac
from collections.abc import Iterable


class Keys:
    """The keys that are let in; none: everybody is. Compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: str | None) -> bool:
        """Whether an Authorization header, decoded as Latin-1, carries one of the keys."""
        if not self._digests:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        found = _digest(key.strip().encode("latin-1"))  # the header's own bytes
        # No early end: the time taken does not tell which key came close.
        matches = [hmac.compare_digest(found, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
