"""Which worker gets which sample."""

from collections import Counter

import numpy as np
import pytest
import simpy
from helpers import a_worker, recorder, rollout, sample
from hypothesis import given
from hypothesis import strategies as st

from simrl.dispatch import DISPATCHES, Dispatcher
from simrl.dispatch.even_split import even_split
from simrl.dispatch.least_requests import least_requests
from simrl.dispatch.round_robin import round_robin
from simrl.events import gather
from simrl.history import LengthHistory

NO_HISTORY = LengthHistory()


def samples(n):
    return [sample(uid) for uid in range(n)]


def nothing_unfinished(workers):
    return np.zeros(workers, dtype=np.int64)


def test_even_split_cuts_the_batch_into_contiguous_parts_the_first_ones_larger():
    assert even_split(samples(7), nothing_unfinished(3), 0, NO_HISTORY) == [0, 0, 0, 1, 1, 2, 2]
    assert even_split(samples(2), nothing_unfinished(3), 5, NO_HISTORY) == [0, 1]


def test_least_requests_fills_up_the_workers_that_hold_least():
    assert least_requests(samples(5), np.array([3, 0, 1]), 9, NO_HISTORY) == [1, 1, 2, 1, 2]


def test_round_robin_goes_on_where_it_stopped_whatever_the_workers_hold():
    assert round_robin(samples(4), np.array([9, 0, 0]), 5, NO_HISTORY) == [2, 0, 1, 2]


@given(st.sampled_from(sorted(DISPATCHES)), st.integers(0, 50), st.integers(1, 9), st.integers(0, 100))
def test_every_rule_shares_a_batch_evenly_among_idle_workers(name, n, workers, submitted):
    places = DISPATCHES[name].place(samples(n), nothing_unfinished(workers), submitted, NO_HISTORY)
    assert len(places) == n
    held = Counter({worker: 0 for worker in range(workers)}) + Counter(places)
    counts = [held[worker] for worker in range(workers)]
    assert sum(counts) == n
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 30))
def test_least_requests_never_gives_to_a_worker_that_holds_more_than_another(unfinished, n):
    load = np.array(unfinished)
    for worker in least_requests(samples(n), np.array(unfinished), 0, NO_HISTORY):
        assert load[worker] == load.min()
        load[worker] += 1


def workers(env, n=2):
    record = recorder(*(f"rollout-{i:03d}" for i in range(n)))
    return [a_worker(env, i, record=record) for i in range(n)]


def dispatcher_of(env, workers, rule):
    return Dispatcher(env, workers, DISPATCHES[rule], recorder())


def test_a_dispatcher_counts_what_is_unfinished_and_forgets_what_has_ended():
    env = simpy.Environment()
    dispatcher = dispatcher_of(env, workers(env), "least_requests")
    dispatcher.submit([sample(0, response_tokens=20), sample(1, response_tokens=3), sample(2, response_tokens=20)])
    env.run(until=5.0)  # worker 0 holds two, worker 1 none any more
    ends = env.run(gather(env, dispatcher.submit([sample(3), sample(4)])))
    assert [end.segments[0].worker for end in ends] == [1, 1]


def test_round_robin_counts_over_all_that_was_submitted():
    env = simpy.Environment()
    dispatcher = dispatcher_of(env, workers(env, 3), "round_robin")
    events = [*dispatcher.submit([sample(0), sample(1)]), *dispatcher.submit([sample(2), sample(3)])]
    assert [end.segments[0].worker for end in env.run(gather(env, events))] == [0, 1, 2, 0]


def test_events_come_in_the_order_of_the_samples_and_carry_their_rollouts():
    env = simpy.Environment()
    dispatcher = dispatcher_of(env, workers(env), "even_split")
    batch = [sample(uid, response_tokens=n) for uid, n in enumerate([9, 2, 5])]
    ends = env.run(gather(env, dispatcher.submit(batch)))
    assert [end.sample for end in ends] == batch
    assert all(end.done for end in ends)


class FailingWorker:
    """What a worker on real hardware does when its engine dies."""

    policy_version = 0

    def __init__(self, env):
        self.env = env

    def submit(self, sample, partial=None, max_tokens=None, cached=False):
        return self.env.event().fail(ConnectionError("engine 0 died"))


def test_a_failure_of_a_worker_reaches_who_waits_for_the_sample_with_its_cause():
    env = simpy.Environment()
    dispatcher = dispatcher_of(env, [FailingWorker(env)], "round_robin")
    with pytest.raises(ConnectionError, match="engine 0 died"):
        env.run(gather(env, dispatcher.submit(samples(3))))
    env.run()  # the other two failures are defused


def test_a_response_that_was_aborted_at_its_worker_is_handed_on_as_unfinished():
    env = simpy.Environment()
    [worker] = workers(env, 1)
    dispatcher = dispatcher_of(env, [worker], "round_robin")
    [end] = dispatcher.submit([sample(0, response_tokens=50)])
    env.run(until=2.5)
    worker.abort(sample(0, response_tokens=50))
    stopped = env.run(end)
    assert (stopped.done, stopped.tokens) == (False, 3)
    assert stopped == rollout(0, {0: 3}, done=False)._replace(sample=stopped.sample, first_token_s=1.0)
