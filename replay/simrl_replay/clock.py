"""WallClock: SimPy's environment on the wall clock, so that a schedule runs unchanged with real
engines.

Invariant: `now` never falls, and no event is processed before its time. A timeout is processed with
its own instant as `now`, even if the process is late; an external message is processed with the
instant at which it was read. An empty heap does not end the run while an external message may still
arrive; nor do timers in the background keep a run going in which none is awaited.

Times are seconds since the clock was started. A child process subtracts `monotonic_s` from its own
`time.monotonic()` (one clock for all processes of a host) to get times on this clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import simpy
from simpy.core import EmptySchedule

from simrl.interrupts import ctrl_c_waits
from simrl.runtime.events import Background, call_at, idle

LONGEST_WAIT_S = 0.5  # a signal is noticed within this time


class WallClock(simpy.Environment):
    """`simpy.Environment` that waits for timeouts, receives messages (`listen`) and polls
    (`check`)."""

    def __init__(self) -> None:
        super().__init__()
        self.monotonic_s = time.monotonic()
        self._listeners: dict[
            Connection, tuple[Callable[[Any], None], Callable[[], None], Callable[[], bool]]
        ] = {}
        self._ended: set[Connection] = set()  # at their end, `on_end` not called yet
        self._checks: list[Callable[[], None]] = []
        self._checked_s = 0.0
        self._pressed: list[int] = []  # Ctrl-C signals received while waiting

    def restart(self) -> None:
        """Set the clock to 0. Call it when engines are up, before anything is scheduled."""
        if self._queue or self._now:
            raise RuntimeError("a clock that runs cannot begin anew")
        self.monotonic_s = time.monotonic()

    def wall_s(self) -> float:
        """Return the time on the wall clock; `now` is never ahead of it by more than a timeout's
        rounding."""
        return time.monotonic() - self.monotonic_s

    def listen(
        self,
        connection: Connection,
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
        awaits: Callable[[], bool] = lambda: True,
    ) -> None:
        """Call `on_message` with each message, at the instant at which it is read, and `on_end`
        once when the other side is gone; neither is called after that, nor after `forget`. `awaits`
        says whether a message is to come."""
        self._listeners[connection] = (on_message, on_end, awaits)

    def forget(self, connection: Connection) -> None:
        """Stop listening; drop messages that were read but not delivered."""
        self._listeners.pop(connection, None)

    def check(self, call: Callable[[], None]) -> None:
        """Call `call` about twice a second, to detect failures that send no message, such as an
        engine that hangs."""
        self._checks.append(call)

    def awaits_message(self) -> bool:
        """Return whether a message is to come."""
        return any(awaits() for _, _, awaits in self._listeners.values())

    def run(self, until: Any = None) -> Any:
        """Run like SimPy's environment. Ctrl-C is raised between two events, never within one."""
        with ctrl_c_waits() as self._pressed:
            return super().run(until)

    def step(self) -> None:
        """Wait until the next event is due, then process it; messages that arrive meanwhile become
        events."""
        while (ahead_s := self.peek() - self.wall_s()) > 0.0:
            if ahead_s == math.inf and not self._listeners:
                break  # nothing can arrive: SimPy raises EmptySchedule
            self._hear(min(ahead_s, LONGEST_WAIT_S))
            if self._pressed:
                raise KeyboardInterrupt
            if self.wall_s() - self._checked_s >= LONGEST_WAIT_S:
                self._checked_s = self.wall_s()
                if idle(self, Background):
                    raise EmptySchedule
                for (
                    call
                ) in self._checks:  # after the messages just read, which may answer the check
                    call_at(self, self._checked_s, call)
        if self._pressed:
            raise KeyboardInterrupt
        super().step()

    def _hear(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for messages. Each becomes an event at the instant at which it was
        read."""
        heard = [connection for connection in self._listeners if connection not in self._ended]
        if not heard:
            time.sleep(timeout_s)
            return
        for connection in wait(heard, timeout_s):
            assert isinstance(connection, Connection)
            try:
                tell = partial(self._tell, connection, connection.recv())
            except (EOFError, OSError):
                self._ended.add(connection)
                tell = partial(self._tell_end, connection)
            call_at(self, self.wall_s(), tell)

    def _tell(self, connection: Connection, message: Any) -> None:
        if connection in self._listeners:  # else `forget` was called after the read
            self._listeners[connection][0](message)

    def _tell_end(self, connection: Connection) -> None:
        self._ended.discard(connection)
        if connection in self._listeners:
            self._listeners.pop(connection)[1]()
