"""Events of schedules in addition to SimPy's own, on a simulated and on a wall clock."""

from collections.abc import Callable, Iterable
from heapq import heappush
from typing import Any

import simpy

LAST = 2  # after SimPy's URGENT (0) and NORMAL (1): what happens when everything else of an instant has happened


def gather(env: simpy.Environment, events: Iterable[simpy.Event]) -> simpy.Event:
    """Fires with the list of the events' values, in their order, when all have fired; fails with the first failure.

    SimPy's `AllOf` gives a dict and leaves the later ones of several failures to crash the run; here they are defused.
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
    """A timeout that no run can be waiting for, such as the start of a fault."""


def idle(env: simpy.Environment, *background: type[simpy.Timeout]) -> bool:
    """Return whether nothing is due but timeouts of these kinds, and no message from outside is awaited."""
    awaits = getattr(env, "awaits_message", None)  # of a clock that hears messages
    return not (awaits and awaits()) and all(isinstance(entry[-1], background) for entry in env._queue)


class Signal:
    """An event that fires again and again: `next` is the event of the next time."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self.next = env.event()

    def fire(self, value: object = None) -> None:
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
        event.callbacks.append(call)  # type: ignore[arg-type]  # what it returns is not looked at


class _Call:
    """An entry of SimPy's queue that calls something, and nothing else: a fraction of the cost of an event, which others could
    wait for."""

    __slots__ = ("call", "callbacks")
    _ok = True

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.callbacks: Any = _HAPPENS


_HAPPENS = (lambda entry: entry.call(),)  # SimPy calls it with the entry


def call_at(env: simpy.Environment, time_s: float, call: Callable[[], object]) -> None:
    """Call at `time_s` exactly, or now if that has been. (SimPy takes delays: added to now, one may round beside the time.)"""
    now_s = env.now
    heappush(env._queue, (time_s if time_s > now_s else now_s, simpy.events.NORMAL, next(env._eid), _Call(call)))  # type: ignore[misc]


def call_last(env: simpy.Environment, call: Callable[[], object]) -> None:
    """Call at this instant, after every event that is scheduled for it in the ordinary way."""
    heappush(env._queue, (env.now, LAST, next(env._eid), _Call(call)))  # type: ignore[misc]


def once_an_instant(env: simpy.Environment, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that asks for `call` at the end of the instant (`call_last`), once however often it is asked for."""
    asked = False

    def happen() -> None:
        nonlocal asked
        asked = False
        call()

    def ask() -> None:
        nonlocal asked
        if not asked:
            asked = True
            call_last(env, happen)

    return ask
