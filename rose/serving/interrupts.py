"""Ctrl-C at moments that suit: what a block changes is changed completely or not at all."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C until the block is left; a second one is not held back.

    Where Ctrl-C raises no KeyboardInterrupt (other threads, programs with a handler of their own)
    there is nothing to do.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            signal.default_int_handler(number, frame)
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt
