"""Child processes of the supervisor: started, watched by their heartbeats, started again."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from rose.serving.process import (
    HEARTBEAT_VARIABLE,
    KEYS_VARIABLE,
    PARENT_VARIABLE,
    RESTARTS_VARIABLE,
)

log = logging.getLogger(__name__)

FROZEN_S = 10.0  # without a heartbeat, once there was one
LONGEST_TURN_S = 0.5  # what is longer between two looks is a pause of this process too
STEADY_S = 60.0  # a child that was up for so long starts with a clean record
KILL_LIMIT_S = 5.0
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
        self._up_since: float | None = None  # its first heartbeat
        self._silent_s = 0.0
        self._looked = 0.0
        self._start_again: float | None = None
        self._failures = 0
        self._asked = False  # to end and be started again
        self.restarts = 0

    @property
    def up(self) -> bool:
        """Whether its event loop has started."""
        return self._up_since is not None

    def start(self) -> None:
        """Start the process, in a session of its own, so that Ctrl-C reaches the parent alone.

        Raises:
            OSError: the system has no room for another process.
        """
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment(writing),
                stdin=subprocess.DEVNULL,
                pass_fds=(*self._inherit, writing),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._heartbeat, self._start_again, self._asked = reading, None, False
        self._up_since, self._silent_s, self._looked = None, 0.0, time.monotonic()

    def _environment(self, heartbeat: int) -> dict[str, str]:
        """The parent's, but only this child's secrets."""
        return {
            **{name: value for name, value in os.environ.items() if name != KEYS_VARIABLE},
            **self._secrets,
            PARENT_VARIABLE: str(os.getpid()),
            HEARTBEAT_VARIABLE: str(heartbeat),
            RESTARTS_VARIABLE: str(self.restarts),
        }

    def check_started(self) -> None:
        """Look for a first heartbeat; raise `ChildFailedError` if the process has ended."""
        self._listen()
        if (end := self._ended()) is not None:
            raise ChildFailedError(f"{self.name} {end}; its message is above")

    def keep_running(self) -> None:
        """Kill the process if it is frozen, and start it again if it ended.

        Raises:
            ChildFailedError: it ended too often in a row.
        """
        if self._start_again is not None:
            if time.monotonic() >= self._start_again:
                self._restart()
        elif (end := self._ended()) is not None:
            if self._asked:
                self.close()
                self._restart()
            else:
                self._plan_restart(end)
        elif self._frozen():
            log.error("%s gives no sign of life and is killed", self.name)
            self.kill()
            self._plan_restart("was frozen")

    def terminate(self) -> None:
        """Ask the process to finish and end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def restart(self, reason: str) -> None:
        """Let the process finish and end; `keep_running` starts it again then."""
        if not self._asked:
            log.warning("%s is started again: %s", self.name, reason)
            self._asked = True
            self.terminate()

    def kill(self) -> None:
        """End the process now. One that the kernel does not let go is left behind."""
        if self._process is not None:
            self._process.kill()
            if not self.wait(KILL_LIMIT_S):
                log.error("%s (pid %d) does not end", self.name, self._process.pid)

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

    def bad_end(self) -> str | None:
        """Say how the process ended if it was neither well nor by being asked to."""
        code = self._process.poll() if self._process is not None else None
        return None if code in (None, 0, -signal.SIGTERM) else describe_end(code)

    def _ended(self) -> str | None:
        """Say how the process ended; None while it runs."""
        code = self._process.poll() if self._process is not None else None
        return None if code is None else describe_end(code)

    def _frozen(self) -> bool:
        """Whether it has been silent for too long since its first heartbeat."""
        self._listen()
        return self.up and self._silent_s > FROZEN_S

    def _listen(self) -> None:
        """Take in heartbeats, or count the time without."""
        assert self._heartbeat is not None
        now = time.monotonic()
        self._silent_s += min(now - self._looked, LONGEST_TURN_S)
        self._looked = now
        with contextlib.suppress(BlockingIOError):
            if os.read(self._heartbeat, 4096):
                self._silent_s = 0.0
                self._up_since = self._up_since or now

    def _restart(self) -> None:
        self.restarts += 1
        try:
            self.start()
        except OSError as error:
            self._plan_restart(f"could not be started ({error})")

    def _plan_restart(self, end: str) -> None:
        steady = self._up_since is not None and time.monotonic() - self._up_since > STEADY_S
        self._failures = 1 if steady else self._failures + 1
        if self._failures > MAX_FAILURES:
            raise ChildFailedError(f"{self.name} {end}, {self._failures} times in a row")
        delay = min(FIRST_DELAY_S * 2 ** (self._failures - 1), LONGEST_DELAY_S)
        log.error("%s %s; it is started again in %.1f s", self.name, end, delay)
        self.close()
        self._up_since = None
        self._start_again = time.monotonic() + delay


def describe_end(code: int) -> str:
    """Say in words what an exit code of `subprocess` means."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have no names
        name = f"signal {-code}"
    hint = " (perhaps for lack of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
