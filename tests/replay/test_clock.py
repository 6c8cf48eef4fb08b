"""The clock on the wall: SimPy's own rules, with timeouts that wait and messages from outside."""

import math
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import pytest
import simpy
from hypothesis import given, strategies as st

from simrl.runtime.events import call_at, call_last, gather, on_fire
from simrl_replay.clock import LONGEST_WAIT_S, WallClock
from tests.helpers import examples


def heard(env: WallClock, connection: Connection) -> list:
    """Grows by (when, message) as messages are told, and by (when, None) at the end."""
    log: list = []
    env.listen(
        connection,
        lambda message: log.append((env.now, message)),
        lambda: log.append((env.now, None)),
    )
    return log


def later(delay_s: float, *calls) -> threading.Thread:
    """Somebody outside, who does all that after a while."""

    def outside() -> None:
        time.sleep(delay_s)
        for call in calls:
            call()

    thread = threading.Thread(target=outside)
    thread.start()
    return thread


def test_a_timeout_waits_and_never_comes_early():
    started_s, env, seen = time.monotonic(), WallClock(), []

    def process():
        for delay_s in (0.0, 0.02, 0.001, 0.05):
            due_s = env.now + delay_s
            yield env.timeout(delay_s)
            seen.append((env.now, due_s, env.wall_s(), time.monotonic() - started_s))

    env.run(until=env.process(process()))
    for now_s, due_s, wall_s, since_s in seen:
        assert now_s == due_s  # at its own instant, however late the process gets to it
        assert due_s <= wall_s <= since_s


def test_a_clock_that_is_started_anew_shows_zero_and_one_that_runs_cannot_be():
    env = WallClock()
    time.sleep(0.02)
    env.restart()
    assert env.wall_s() < 0.02 <= time.monotonic() - env.monotonic_s + 0.02
    env.timeout(0.0)
    with pytest.raises(RuntimeError):
        env.restart()


@examples(30)
@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(0, 2)), min_size=1, max_size=12))
def test_a_schedule_has_the_same_events_at_the_same_times_as_on_the_simulated_clock(plan):
    """Timeouts, what happens last in an instant, all_of and a gather, nested as drawn."""

    def run(env: simpy.Environment) -> list:
        log: list = []

        def one(i: int, delay_s: float, how: int):
            yield env.timeout(delay_s)
            log.append((i, env.now, "begins"))
            if how == 0:
                call_last(env, lambda: log.append((i, env.now, "last")))
            elif how == 1:
                yield env.all_of([env.timeout(delay_s), env.timeout(0.0)])
            else:
                values = yield gather(
                    env, [env.timeout(0.001, value=i), env.timeout(0.0, value=-i)]
                )
                assert values == [i, -i]
            log.append((i, env.now, "ends"))

        env.run(until=env.all_of([env.process(one(i, *each)) for i, each in enumerate(plan)]))
        return log

    assert run(WallClock()) == run(simpy.Environment())


def test_a_message_is_an_event_of_the_instant_at_which_it_is_read():
    env = WallClock()
    here, there = multiprocessing.Pipe()
    log = heard(env, here)
    sent_s: list[float] = []
    outside = later(0.02, lambda: sent_s.append(env.wall_s()), lambda: there.send("hello"))
    times: list[float] = []

    def ticks():
        while len(times) < 60 or not log:
            yield env.timeout(0.001)
            times.append(env.now)
            assert env.now <= env.wall_s()

    env.run(until=env.process(ticks()))
    outside.join()
    [(heard_s, message)] = log
    assert message == "hello" and sent_s[0] <= heard_s <= env.wall_s()
    everything = sorted([*times, heard_s])
    assert times == sorted(times) and everything.index(heard_s) not in (0,)


def test_what_reacts_to_a_message_happens_at_its_instant():
    env = WallClock()
    here, there = multiprocessing.Pipe()
    answer = env.event()
    env.listen(here, answer.succeed, lambda: None)
    there.send(42)

    def process():
        value = yield answer
        at_s = env.now
        yield env.timeout(0.0)
        return value, at_s, env.now

    value, at_s, then_s = env.run(until=env.process(process()))
    assert value == 42 and at_s == then_s > 0.0


def test_there_is_no_end_while_somebody_may_still_speak():
    env = WallClock()
    here, there = multiprocessing.Pipe()
    done = env.event()
    env.listen(here, done.succeed, lambda: None)
    outside = later(0.05, lambda: there.send("late"))
    assert env.run(until=done) == "late"  # the heap was empty all the time
    outside.join()


def test_without_anybody_outside_an_empty_schedule_is_the_end_as_with_simpy():
    env = WallClock()
    env.timeout(0.001)
    env.run()
    assert env.now == 0.001
    with pytest.raises(RuntimeError, match="No scheduled events left"):
        env.run(until=env.event())


def test_the_other_sides_end_is_told_once_and_after_what_it_said():
    env = WallClock()
    here, there = multiprocessing.Pipe()
    log = heard(env, here)
    for i in range(3):
        there.send(i)
    there.close()
    env.run(until=env.timeout(0.03))
    env.run(until=env.timeout(0.03))
    assert [message for _, message in log] == [0, 1, 2, None]
    assert [at_s for at_s, _ in log] == sorted(at_s for at_s, _ in log)


def test_an_end_within_a_message_is_an_end():
    env = WallClock()
    here, there = multiprocessing.Pipe()
    log = heard(env, here)
    os.write(there.fileno(), b"\x00\x00\x01\x00half")  # of 256 bytes
    there.close()
    env.run(until=env.timeout(0.02))
    assert [message for _, message in log] == [None]


def test_nothing_is_told_of_who_was_forgotten_not_even_what_was_read_before():
    env = WallClock()
    (a, to_a), (b, to_b) = multiprocessing.Pipe(), multiprocessing.Pipe()
    log: list = []

    def hears(name: str, other: Connection):
        def hear(message: object) -> None:
            log.append((name, message))
            env.forget(other)

        return hear

    env.listen(a, hears("a", b), lambda: log.append("end of a"))
    env.listen(b, hears("b", a), lambda: log.append("end of b"))
    to_a.send(1)  # both are there to be read at once
    to_b.send(2)
    to_b.close()
    to_a.close()
    env.run(until=env.timeout(0.03))
    [first, *rest] = log
    assert first in (("a", 1), ("b", 2)) and rest == [f"end of {first[0]}"]


def _a_child_that_fails(connection: Connection) -> None:
    try:
        raise ZeroDivisionError("in the child")
    except ZeroDivisionError as error:
        connection.send(error)


def test_what_fails_in_a_child_surfaces_where_the_schedule_waits_with_its_cause():
    env = WallClock()
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_a_child_that_fails, args=(there,))
    child.start()
    there.close()
    answer = env.event()

    def fail(error: Exception) -> None:
        failure = RuntimeError("the engine failed")
        failure.__cause__ = error
        answer.fail(failure)

    env.listen(here, fail, lambda: None)

    def process():
        try:
            yield answer
        except RuntimeError as error:
            return error

    causes = [env.run(until=env.process(process()))]
    child.join()
    while causes[-1].__cause__ is not None:  # SimPy adds one of its own
        causes.append(causes[-1].__cause__)
    assert isinstance(causes[-1], ZeroDivisionError) and "in the child" in str(causes[-1])


def test_of_several_failures_at_once_the_schedule_hears_one_and_goes_on():
    env = WallClock()
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    events = [env.event() for _ in pipes]
    for (here, there), event in zip(pipes, events, strict=True):
        env.listen(here, lambda message, event=event: event.fail(ValueError(message)), lambda: None)
        there.send("bad")

    def process():
        with pytest.raises(ValueError, match="bad"):
            yield gather(env, events)
        yield env.timeout(0.02)  # the others fail meanwhile
        return all(event.processed for event in events)

    assert env.run(until=env.process(process()))


def test_a_failure_that_nobody_waits_for_ends_the_run():
    env = WallClock()
    here, there = multiprocessing.Pipe()

    def wrong(message: object) -> None:
        raise KeyError(message)

    env.listen(here, wrong, lambda: None)
    there.send("what")
    with pytest.raises(KeyError, match="what"):
        env.run(until=env.event())


def test_checks_are_made_while_nothing_happens():
    env, times = WallClock(), []
    env.check(lambda: times.append(env.wall_s()))
    env.run(until=env.timeout(2.5 * LONGEST_WAIT_S))
    assert len(times) == 2 and times[0] >= LONGEST_WAIT_S


def test_checks_come_behind_what_was_said_while_the_process_was_busy():
    env, log = WallClock(), []
    here, there = multiprocessing.Pipe()
    env.listen(here, log.append, lambda: None)
    env.check(lambda: log.append("check"))

    def busy() -> None:
        there.send("alive")
        time.sleep(
            1.5 * LONGEST_WAIT_S
        )  # a check is due when it is over, and the message has not been read yet

    call_at(env, 0.01, busy)
    env.run(until=env.timeout(2 * LONGEST_WAIT_S))
    assert log[:2] == ["alive", "check"]


def test_ctrl_c_comes_between_two_events_and_not_within_one():
    env, log = WallClock(), []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def busy() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        log.append("to its end")

    try:
        call_at(env, 0.01, busy)
        call_at(env, 0.01, lambda: log.append("the next event"))
        with pytest.raises(KeyboardInterrupt):
            env.run(until=env.timeout(60.0))
        assert log == ["to its end"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_heard_while_the_clock_waits():
    env = WallClock()
    here, _there = multiprocessing.Pipe()
    heard(env, here)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    outside = later(0.02, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            env.run(until=env.timeout(math.inf))
    finally:
        signal.signal(signal.SIGINT, before)
        outside.join()


def test_a_run_goes_on_where_the_last_one_ended():
    env, log = WallClock(), []
    on_fire(env.timeout(0.02), lambda _: log.append(env.now))
    env.run(until=env.timeout(0.01))
    assert log == []
    time.sleep(0.03)
    env.run(until=env.timeout(0.02))
    assert log == [0.02]
