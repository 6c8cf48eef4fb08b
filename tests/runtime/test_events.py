"""What schedules wait with: the order of what fires, and failures that keep their cause."""

import pytest
import simpy
from hypothesis import example, given, strategies as st

from simrl.runtime.events import call_at, call_last, gather, on_fire


def test_gather_gives_the_values_in_the_order_asked_whatever_fires_first():
    env = simpy.Environment()
    events = [env.timeout(delay, value=delay) for delay in (3.0, 1.0, 2.0)]
    assert env.run(gather(env, events)) == [3.0, 1.0, 2.0]
    assert env.now == 3.0


def test_gather_of_nothing_and_of_what_has_fired_already_fires_at_once():
    env = simpy.Environment()
    fired = env.timeout(1.0, value="early")
    env.run(until=2.0)
    assert env.run(gather(env, [])) == []
    assert env.run(gather(env, [fired, fired])) == ["early", "early"]
    assert env.now == 2.0


def test_gather_fails_with_the_first_failure_and_the_later_ones_do_not_crash_the_run():
    env = simpy.Environment()
    events = [env.event() for _ in range(3)]
    gathered = gather(env, events)
    call_at(env, 1.0, lambda: events[1].fail(ValueError("the first")))
    call_at(env, 2.0, lambda: events[0].fail(ValueError("the second")))
    call_at(env, 3.0, lambda: events[2].succeed())
    with pytest.raises(ValueError, match="the first"):
        env.run(gathered)
    env.run()
    assert env.now == 3.0


def test_on_fire_calls_when_the_event_fires_or_at_once_if_it_has():
    env, calls = simpy.Environment(), []
    event = env.timeout(1.0, value="x")
    on_fire(event, lambda e: calls.append((env.now, e.value)))
    assert calls == []
    env.run(until=5.0)
    on_fire(event, lambda e: calls.append((env.now, e.value)))
    assert calls == [(1.0, "x"), (5.0, "x")]


@given(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)).map(sorted))
@example(
    [2.0**-53, 1 + 2.0**-52]
)  # now + (time - now) < time, as in one in a hundred pairs of everyday size
def test_call_at_calls_at_that_time_exactly(times):
    now_s, time_s = times
    env, called_s = simpy.Environment(initial_time=now_s), []
    call_at(env, time_s, lambda: called_s.append(env.now))
    env.run()
    assert called_s == [time_s]


def test_call_at_a_time_that_has_passed_calls_now():
    env, called_s = simpy.Environment(initial_time=7.0), []
    call_at(env, 3.0, lambda: called_s.append(env.now))
    env.run()
    assert called_s == [7.0]


def test_call_last_waits_for_everything_of_the_instant_also_for_what_it_sets_off():
    env, order = simpy.Environment(), []

    def first(_):
        call_last(env, lambda: order.append("last"))
        on_fire(env.timeout(0), lambda _: order.append("set off"))

    on_fire(env.timeout(1.0), first)
    on_fire(env.timeout(1.0), lambda _: order.append("same instant"))
    on_fire(env.timeout(1.5), lambda _: order.append("later"))
    env.run()
    assert order == ["same instant", "set off", "last", "later"]
