"""What holds for every test."""

import contextlib
import fcntl
import os
import signal

import pytest
from hypothesis import Phase, settings

# Before torch is there: models are tiny, and threads would wait for each other, above all where
# workers share the cores. Tests that are about threads ask for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without the phase that explains failures, which traces every line of every run to be able to. The
# same examples in every run: whoever wants others says `--hypothesis-profile default`.
settings.register_profile(
    "rose",
    phases=[phase for phase in Phase if phase is not Phase.explain],
    derandomize=True,
    deadline=None,
)
settings.load_profile("rose")


@pytest.fixture(scope="session", autouse=True)
def signals_reach_children():
    """Shells start what runs in the background with SIGINT ignored, and `nohup` ignores SIGHUP.

    Children inherit that, and tests that send these signals to a command would wait in vain.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.getsignal(signal.SIGHUP),
    }
    if before[signal.SIGHUP] is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # children get the system's default
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def turn(folder, *, alone):
    """Hold a place among the workers, or all of them: who waits at the door keeps others out."""
    with (folder / "door.lock").open("w") as door, (folder / "room.lock").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # closing is not enough: a forked child may live on


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """With several workers (`pytest -n 2`), let the others wait while an `alone` test runs."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folder = item.config._tmp_path_factory.getbasetemp().parent  # the same for all workers
    with turn(folder, alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_collection_modifyitems(items):
    """Refuse names that differ between processes, which workers could not share out."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: an address is no name: give `ids`")
