"""Child processes: heartbeats, restarts, giving up. The child is a small script, not an engine."""

import os
import signal
import sys
import time

import pytest

from rose.serving import children
from rose.serving.children import Child, ChildFailedError, describe_end

BEATS = """
import os, time
while True:
    os.write(int(os.environ["ROSE_HEARTBEAT_FD"]), b".")
    time.sleep(0.02)
"""
BEATS_ONCE_AND_DIES = BEATS.replace("time.sleep(0.02)", "raise SystemExit(3)")
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
    keep_until(child, lambda: child.up)
    os.kill(child._process.pid, number)
    keep_until(child, lambda: child.restarts == 1 and child.up)
    assert child._process.poll() is None


def test_a_pause_of_the_supervisor_itself_is_no_frozen_child(make, monkeypatch):
    child = make(BEATS)
    keep_until(child, lambda: child.up)
    os.kill(child._process.pid, signal.SIGSTOP)  # the whole tree is paused
    child._frozen()  # what was written before is read
    monkeypatch.setattr(children, "LONGEST_TURN_S", 0.05)
    later = time.monotonic() + 3600
    monkeypatch.setattr(children.time, "monotonic", lambda: later)
    child.keep_running()
    monkeypatch.undo()
    os.kill(child._process.pid, signal.SIGCONT)
    assert child._process.poll() is None
    assert child._start_again is None


def test_a_child_without_a_heartbeat_yet_has_all_the_time_it_needs(make):
    child = make("import time; time.sleep(60)")
    end = time.monotonic() + 1
    keep_until(child, lambda: time.monotonic() > end)
    assert child.restarts == 0


def test_a_child_that_keeps_failing_is_given_up(make):
    child = make(DIES)
    with pytest.raises(ChildFailedError, match="worker ended with exit code 3, 4 times in a row"):
        keep_until(child, lambda: False)
    assert child.restarts == 3


@pytest.mark.parametrize("loading_s", [0, 0.5])
def test_time_to_load_does_not_make_a_child_steady(make, monkeypatch, loading_s):
    monkeypatch.setattr(children, "STEADY_S", 0.3)
    child = make(f"import time; time.sleep({loading_s})\n{BEATS_ONCE_AND_DIES}")
    with pytest.raises(ChildFailedError, match="4 times in a row"):
        keep_until(child, lambda: False)


def test_a_child_that_was_up_for_long_starts_with_a_clean_record(make, monkeypatch):
    monkeypatch.setattr(children, "STEADY_S", 0.1)
    beats_and_dies = BEATS.replace("while True", "for _ in range(20)") + DIES
    child = make(beats_and_dies)
    keep_until(child, lambda: child.restarts == 5)


def test_a_child_that_the_system_cannot_start_is_tried_again(make, monkeypatch):
    child = make(DIES)
    start, fails = child.start, [True, False]

    def sometimes():
        if fails.pop(0):
            raise OSError("no memory")
        child._command = [sys.executable, "-c", BEATS]
        start()

    child.start = sometimes
    keep_until(child, lambda: child.up)
    assert child.restarts == 2


def test_a_child_that_ends_at_start_up_is_an_error_at_once(make):
    child = make(DIES)
    assert child.wait(20)
    with pytest.raises(
        ChildFailedError, match="worker ended with exit code 3; its message is above"
    ):
        child.check_started()


def test_only_the_secrets_that_are_meant_for_a_child_are_in_its_environment(make, monkeypatch):
    monkeypatch.setenv("ROSE_API_KEY", "k")
    child = make("import os, sys; sys.exit(7 * (os.environ['SECRET'] == 's'))")
    assert child.wait(20)
    assert child._process.returncode == 7
    child = make("import os, sys; sys.exit(7 * ('ROSE_API_KEY' not in os.environ))")
    assert child.wait(20)
    assert child._process.returncode == 7


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (-15, "was ended by SIGTERM"),
        (-9, "was ended by SIGKILL (perhaps for lack of memory)"),
        (-40, "was ended by signal 40"),
    ],
)
def test_an_end_in_words(code, words):
    assert describe_end(code) == words


def test_no_file_descriptor_is_left(make):
    before = len(os.listdir("/proc/self/fd"))
    child = make(DIES)
    with pytest.raises(ChildFailedError):
        keep_until(child, lambda: False)
    child.close()
    assert len(os.listdir("/proc/self/fd")) == before
