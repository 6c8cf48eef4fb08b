"""WallClock: SimPy's environment on the clock of the wall, so that a schedule runs unchanged beside real engines.

Invariant: `now` never falls, and no event is processed before its time. A timeout is processed at its own instant, however late
the process gets to it; what comes from outside (a message of an engine) is processed at the instant at which it is read.
An empty heap is not the end while somebody outside may still send a message.

Times are seconds since the clock was started; `monotonic_s` is what a child process has to subtract from its own
`time.monotonic()` (one clock for all processes of a host) to speak of the same instants.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import simpy

from simrl.events import call_at
from simrl.interrupts import ctrl_c_waits

LONGEST_WAIT_S = 0.5  # a signal is noticed after that at the latest


class WallClock(simpy.Environment):
    """`simpy.Environment` whose timeouts wait. `listen` gives it ears, `check` eyes."""

    def __init__(self) -> None:
        super().__init__()
        self.monotonic_s = time.monotonic()
        self._listeners: dict[Connection, tuple[Callable[[Any], None], Callable[[], None]]] = {}
        self._ended: set[Connection] = set()  # of them, those at whose end this has yet to be told
        self._checks: list[Callable[[], None]] = []
        self._checked_s = 0.0
        self._pressed: list[int] = []  # Ctrl-C, while it waits

    def restart(self) -> None:
        """The clock shows 0 again. Only before anything is scheduled: engines are up, the schedule begins."""
        if self._queue or self._now:
            raise RuntimeError("a clock that runs cannot begin anew")
        self.monotonic_s = time.monotonic()

    def wall_s(self) -> float:
        """What the clock on the wall shows; `now` is never ahead of it by more than a timeout's rounding."""
        return time.monotonic() - self.monotonic_s

    def listen(self, connection: Connection, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Calls `on_message` with each message that comes, at the instant at which it is read, and `on_end` once when the other
        side is gone; nothing is heard from it after that, nor after `forget`."""
        self._listeners[connection] = (on_message, on_end)

    def forget(self, connection: Connection) -> None:
        """Also what was read from it and not told yet."""
        self._listeners.pop(connection, None)

    def check(self, call: Callable[[], None]) -> None:
        """Calls about twice a second, to look for what sends no message, such as an engine that hangs."""
        self._checks.append(call)

    def run(self, until: Any = None) -> Any:
        """As SimPy's. Ctrl-C comes between two events, never within one."""
        with ctrl_c_waits() as self._pressed:
            return super().run(until)

    def step(self) -> None:
        """Processes the next event once it is due; hears what is said meanwhile, which makes events of its own."""
        while (ahead_s := self.peek() - self.wall_s()) > 0.0:
            if ahead_s == math.inf and not self._listeners:
                break  # nobody will ever say anything: SimPy says so, too
            self._hear(min(ahead_s, LONGEST_WAIT_S))
            if self._pressed:
                raise KeyboardInterrupt
            if self.wall_s() - self._checked_s >= LONGEST_WAIT_S:
                self._checked_s = self.wall_s()
                for call in self._checks:  # behind what was just heard: it may be news of what is looked for
                    call_at(self, self._checked_s, call)
        if self._pressed:
            raise KeyboardInterrupt
        super().step()

    def _hear(self, timeout_s: float) -> None:
        """Waits so long at most for messages. Each becomes an event of the instant at which it was read."""
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
        if connection in self._listeners:  # else forgotten since it was read
            self._listeners[connection][0](message)

    def _tell_end(self, connection: Connection) -> None:
        self._ended.discard(connection)
        if connection in self._listeners:
            self._listeners.pop(connection)[1]()
