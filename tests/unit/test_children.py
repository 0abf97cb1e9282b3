"""Child processes: heartbeats, restarts, giving up. The child is a small script, not an engine."""

import os
import signal
import sys
import time

import pytest

from rose.serving import children
from rose.serving.children import Child, ChildFailedError

BEATS = """
import os, time
while True:
    os.write(int(os.environ["ROSE_HEARTBEAT_FD"]), b".")
    time.sleep(0.02)
"""
DIES = "raise SystemExit(3)"


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(children, "FROZEN_S", 0.5)
    monkeypatch.setattr(children, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(children, "MAX_FAILURES", 3)
    made = []

    def make(script):
        child = Child("worker", [], secrets={"SECRET": "s"})
        child._command = [sys.executable, "-c", script]
        child.start()
        made.append(child)
        return child

    yield make
    for child in made:
        child.kill()
        child.close()


def keep_until(child, condition, timeout=20):
    deadline = time.monotonic() + timeout
    while not condition():
        child.keep_running()
        time.sleep(0.01)
        assert time.monotonic() < deadline


def test_a_child_that_beats_is_left_alone(make):
    child = make(BEATS)
    end = time.monotonic() + 1.5
    keep_until(child, lambda: time.monotonic() > end)
    assert child.restarts == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_child_is_started_again(make, number):
    child = make(BEATS)
    keep_until(child, lambda: child._last_beat is not None)
    os.kill(child._process.pid, number)
    keep_until(child, lambda: child.restarts == 1 and child._last_beat is not None)
    assert child._process.poll() is None


def test_a_child_without_a_heartbeat_yet_has_all_the_time_it_needs(make):
    child = make("import time; time.sleep(60)")
    end = time.monotonic() + 1
    keep_until(child, lambda: time.monotonic() > end)
    assert child.restarts == 0


def test_a_child_that_keeps_failing_is_given_up(make):
    child = make(DIES)
    with pytest.raises(ChildFailedError, match="worker ended with 3, 4 times in a row"):
        keep_until(child, lambda: False)
    assert child.restarts == 3


def test_a_child_that_ends_at_start_up_is_an_error_at_once(make):
    child = make(DIES)
    assert child.wait(20)
    with pytest.raises(ChildFailedError, match="worker ended with 3; its message is above"):
        child.check_started()


def test_secrets_are_in_the_environment(make):
    child = make("import os, sys; sys.exit(7 if os.environ['SECRET'] == 's' else 1)")
    assert child.wait(20)
    assert child._process.returncode == 7
