"""Child processes of the supervisor: started, watched by their heartbeats, started again."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from rose.serving.process import HEARTBEAT_VARIABLE, PARENT_VARIABLE

log = logging.getLogger(__name__)

FROZEN_S = 10.0  # without a heartbeat, once there was one
STEADY_S = 60.0  # a child that ran for so long starts with a clean record
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
MAX_FAILURES = 5  # in a row


class ChildFailedError(RuntimeError):
    """A process of the tree could not start, or was lost for good."""


class Child:
    """One process that is kept running."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        secrets: Mapping[str, str],
        inherit: Sequence[int] = (),
    ) -> None:
        """Describe a `rose` command to run; `inherit` are file descriptors that it gets."""
        self.name = name
        self._command = [sys.executable, "-m", "rose", *arguments]
        self._secrets = secrets
        self._inherit = tuple(inherit)
        self._process: subprocess.Popen[bytes] | None = None
        self._heartbeat: int | None = None
        self._last_beat: float | None = None
        self._started = 0.0
        self._start_again: float | None = None
        self._failures = 0
        self.restarts = 0

    def start(self) -> None:
        """Start the process, in a session of its own, so that Ctrl-C reaches the parent alone."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        environment = {
            **os.environ,
            **self._secrets,
            PARENT_VARIABLE: str(os.getpid()),
            HEARTBEAT_VARIABLE: str(writing),
        }
        try:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(*self._inherit, writing),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        self._heartbeat, self._last_beat = reading, None
        self._started, self._start_again = time.monotonic(), None

    def check_started(self) -> None:
        """Raise `ChildFailedError` if the process has ended."""
        if (end := self._ended()) is not None:
            raise ChildFailedError(f"{self.name} {end}; its message is above")

    def keep_running(self) -> None:
        """Kill the process if it is frozen, and start it again if it ended.

        Raises:
            ChildFailedError: it ended too often in a row.
        """
        if self._start_again is not None:
            if time.monotonic() >= self._start_again:
                self.restarts += 1
                self.start()
            return
        if self._frozen():
            log.error("%s gives no sign of life and is killed", self.name)
            self.kill()
        if (end := self._ended()) is not None:
            self._plan_restart(end)

    def terminate(self) -> None:
        """Ask the process to finish and end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; say whether it did in time."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Let go of the heartbeat's pipe."""
        if self._heartbeat is not None:
            os.close(self._heartbeat)
            self._heartbeat = None

    def _ended(self) -> str | None:
        """Say how the process ended; None while it runs."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def _frozen(self) -> bool:
        assert self._heartbeat is not None
        with contextlib.suppress(BlockingIOError):
            if os.read(self._heartbeat, 4096):
                self._last_beat = time.monotonic()
        return self._last_beat is not None and time.monotonic() - self._last_beat > FROZEN_S

    def _plan_restart(self, end: str) -> None:
        steady = time.monotonic() - self._started > STEADY_S
        self._failures = 1 if steady else self._failures + 1
        if self._failures > MAX_FAILURES:
            raise ChildFailedError(f"{self.name} {end}, {self._failures} times in a row")
        delay = min(FIRST_DELAY_S * 2 ** (self._failures - 1), LONGEST_DELAY_S)
        log.error("%s %s; it is started again in %.1f s", self.name, end, delay)
        self.close()
        self._start_again = time.monotonic() + delay
