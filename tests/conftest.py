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
