"""Events of schedules in addition to those of SimPy, on a simulated and on a wall clock."""

from collections.abc import Callable, Iterable
from heapq import heappush
from typing import Any

import simpy

LAST = 2  # priority after SimPy's URGENT (0) and NORMAL (1): at the end of an instant


def gather(env: simpy.Environment, events: Iterable[simpy.Event]) -> simpy.Event:
    """Return an event that fires with the list of the events' values when all have fired, and fails
    with the first failure.

    SimPy's `AllOf` gives a dict, and the second of two failures crashes the run; here later
    failures are defused.
    """
    pending = list(events)
    done = env.event()
    left = len(pending)

    def one_fired(event: simpy.Event) -> None:
        nonlocal left
        if not event.ok:
            event.defused = True
            if not done.triggered:
                done.trigger(event)
            return
        left -= 1
        if left == 0 and not done.triggered:
            done.succeed([e.value for e in pending])

    for event in pending:
        on_fire(event, one_fired)
    return done if pending else done.succeed([])


class Background(simpy.Timeout):
    """A timeout for which no run waits, such as the start of a fault."""


def idle(env: simpy.Environment, *background: type[simpy.Timeout]) -> bool:
    """Return whether only timeouts of these kinds are due, and no message from outside is
    awaited."""
    awaits = getattr(env, "awaits_message", None)  # of a wall clock, which receives messages
    return not (awaits and awaits()) and all(
        isinstance(entry[-1], background) for entry in env._queue
    )


class Signal:
    """An event that fires repeatedly: `next` is the event of the next time."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self.next = env.event()

    def fire(self, value: object = None) -> None:
        """Fire the present event, and make the next one."""
        fired, self.next = self.next, self._env.event()
        fired.succeed(value)


def succeed_all(events: list[simpy.Event]) -> None:
    """Let events fire, in order, and forget them."""
    while events:
        events.pop(0).succeed()


def on_fire(event: simpy.Event, call: Callable[[Any], object]) -> None:
    """Call `call(event)` when the event is processed; at once if it has been."""
    if event.callbacks is None:
        call(event)
    else:
        event.callbacks.append(call)  # type: ignore[arg-type]  # SimPy ignores its return value


class _Call:
    """An entry of SimPy's queue that only calls a function: much cheaper than an event, and nothing
    can wait for it."""

    __slots__ = ("call", "callbacks")
    _ok = True

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.callbacks: Any = _HAPPENS


_HAPPENS = (lambda entry: entry.call(),)  # SimPy calls it with the entry


def call_at(env: simpy.Environment, time_s: float, call: Callable[[], object]) -> None:
    """Call at exactly `time_s`, or now if that is past. (SimPy takes delays, and now plus a delay
    may round differently.)"""
    now_s = env.now
    heappush(
        env._queue,
        (time_s if time_s > now_s else now_s, simpy.events.NORMAL, next(env._eid), _Call(call)),
    )  # type: ignore[misc]


def call_last(env: simpy.Environment, call: Callable[[], object]) -> None:
    """Call at the end of this instant, after all of its ordinary events."""
    heappush(env._queue, (env.now, LAST, next(env._eid), _Call(call)))  # type: ignore[misc]


def once_an_instant(env: simpy.Environment, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that requests `call` at the end of the instant (`call_last`), once for all
    requests of the instant."""
    is_requested = False

    def happen() -> None:
        nonlocal is_requested
        is_requested = False
        call()

    def request() -> None:
        nonlocal is_requested
        if not is_requested:
            is_requested = True
            call_last(env, happen)

    return request
