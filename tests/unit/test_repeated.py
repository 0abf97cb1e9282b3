"""A log that nobody can flood."""

import logging

from rose.serving import repeated
from rose.serving.repeated import RepeatedWarning


def test_one_line_at_once_and_then_one_a_minute_with_the_number(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(repeated.time, "monotonic", lambda: now[0])
    warning = RepeatedWarning(logging.getLogger("x"), "refused %s")
    for number in range(1000):
        warning.note(number)
    now[0] += 61
    warning.note("a")
    warning.note("b")
    assert caplog.messages == ["refused 0", "refused a (1000 times since the last line)"]
