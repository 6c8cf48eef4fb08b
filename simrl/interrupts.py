"""Ctrl-C: blocks in which it is ignored, waits, or counts once, and its second chance where Python
drops it. Only the main thread receives signals; elsewhere these do nothing."""

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HEARD_AGAIN_S = 0.01  # longer than most callbacks; in one that lasts longer it is heard once more
Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Ignore Ctrl-C in a block that must not be cut in two. Processes started in it ignore Ctrl-C
    for ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


@contextmanager
def ctrl_c_waits() -> Iterator[list[int]]:
    """Raise `KeyboardInterrupt` at the end of the block, not within: for code that would swallow
    it, such as numba's compiler, whose callbacks from C print an exception and go on. Gives the
    list of signals that wait."""
    waiting: list[int] = []
    try:
        with _heard_by(lambda received, _: waiting.append(received)) as before:
            yield waiting
    finally:
        if waiting:
            before[waiting[0]](waiting[0], None)


@contextmanager
def ctrl_c_once() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at the first Ctrl-C or SIGTERM and ignore further ones until the
    end of the block, which may have to clean up."""

    def hear(received: int, frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _heard_by(hear) as before:
        yield


@contextmanager
def _heard_by(handler: Handler) -> Iterator[dict[int, Handler]]:
    """Let a function handle Ctrl-C and SIGTERM within the block, where other functions do; gives
    those. None do outside the main thread."""
    before: dict[int, Handler] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: earlier for number, earlier in handlers.items() if callable(earlier)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def hear_again(dropped: Any) -> None:
    """Handle an exception that Python cannot raise, as `sys.unraisablehook`, whose argument it
    takes. A callback from C, such as a finaliser, prints `KeyboardInterrupt` and goes on: here it
    is raised again, a moment later and so outside the callback."""
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    # SIGTERM, which `main` handles as Ctrl-C: background jobs of a shell ignore SIGINT
    again = threading.Timer(HEARD_AGAIN_S, _thread.interrupt_main, [signal.SIGTERM])
    again.daemon = True
    again.start()


@contextmanager
def main_left_alone() -> Iterator[None]:
    """Keep processes that are spawned in the block from importing the caller's main module, so that
    a script needs no `if __name__ == "__main__":`."""
    main: Any = sys.modules["__main__"]
    before = {name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)}
    main.__spec__ = None  # where multiprocessing looks for a module's name, and then for its file
    vars(main).pop("__file__", None)
    try:
        yield
    finally:
        vars(main).update(before)
