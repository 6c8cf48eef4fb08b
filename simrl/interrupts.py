"""Ctrl-C: where it has to wait, and who must not hear it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


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
def ctrl_c_waits() -> Iterator[list[int]]:
    """Raises `KeyboardInterrupt` at the end of the block, not within: for what would swallow it, such as numba's compiler,
    whose callbacks from C print an exception and go on. The list that it gives is no longer empty once Ctrl-C waits."""
    waiting: list[int] = []
    before = _heard()
    for number in before:
        signal.signal(number, lambda received, _: waiting.append(received))
    try:
        yield waiting
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            before[waiting[0]](waiting[0], None)


@contextmanager
def ctrl_c_once() -> Iterator[None]:
    """Raises `KeyboardInterrupt` at the first Ctrl-C or SIGTERM, and hears no other until the end of the block: for whoever
    then has something to put in order."""
    before = _heard()

    def hear(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard() -> dict[int, Callable[[int, FrameType | None], Any]]:
    """What Ctrl-C and SIGTERM call now, where they call something; nothing outside the main thread, which alone hears them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {number: handler for number, handler in handlers.items() if callable(handler)}
