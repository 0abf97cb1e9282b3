"""Lines of the log that others can cause as often as they like."""

import logging
import time

INTERVAL_S = 60.0


class RepeatedWarning:
    """A warning that is written at once, and then once a minute with how often it came."""

    def __init__(self, log: logging.Logger, message: str) -> None:
        """Take a message with one `%s`, for what is known of the latest time."""
        self._log = log
        self._message = message
        self._unsaid = 0
        self._said: float | None = None

    def note(self, latest: object) -> None:
        """It has happened once more."""
        self._unsaid += 1
        now = time.monotonic()
        if self._said is not None and now - self._said < INTERVAL_S:
            return
        times = f" ({self._unsaid} times since the last line)" if self._unsaid > 1 else ""
        self._log.warning(f"{self._message}{times}", latest)
        self._unsaid, self._said = 0, now
