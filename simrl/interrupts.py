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
