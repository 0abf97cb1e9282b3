"""What holds for every test."""

import signal

import pytest
from hypothesis import Phase, settings

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
def interrupts_reach_children():
    """A shell without job control starts what runs in the background with SIGINT ignored.

    Children inherit that, and tests that interrupt a command would wait in vain.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
