"""Ctrl-C: where it has to wait, and who must not hear it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """For moments that must not be cut in two. Processes that are started meanwhile never hear Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread hears it anyway
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Raises `KeyboardInterrupt` at the end of the block, not within: for what would swallow it, such as numba's compiler,
    whose callbacks from C print an exception and go on."""
    waiting: list[int] = []
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is signal.default_int_handler]
    if threading.current_thread() is not threading.main_thread():
        heard = []
    for number in heard:
        signal.signal(number, lambda received, _: waiting.append(received))
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.default_int_handler)
        if waiting:
            raise KeyboardInterrupt
