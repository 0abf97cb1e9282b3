"""What holds for every test."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def interrupts_reach_children():
    """A shell without job control starts what runs in the background with SIGINT ignored.

    Children inherit that, and tests that interrupt a command would wait in vain.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
