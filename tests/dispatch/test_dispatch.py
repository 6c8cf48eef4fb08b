"""Which worker gets which sample."""

from collections import Counter

import numpy as np
import pytest
import simpy
from hypothesis import given, strategies as st

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.placement import even_split, least_requests, round_robin, round_robin_groups
from simrl.dispatch.rules import DISPATCHES, Dispatch
from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.runtime.events import gather, on_fire
from simrl.runtime.history import LengthHistory
from simrl.systems.recipes import make_system
from simrl.trace.sample import EVALUATION
from tests.helpers import ROOMY, a_worker, examples, recorder, rollout, sample

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


def test_round_robin_of_groups_sends_all_responses_of_a_prompt_to_one_worker_and_the_next_prompt_to_the_next():
    groups = [sample(uid)._replace(prompt_id=uid // 3) for uid in range(12)]
    assert round_robin_groups(groups[:6], nothing_unfinished(3), 0, NO_HISTORY) == [0] * 3 + [1] * 3
    assert round_robin_groups(groups[6:], np.array([9, 9, 0]), 6, NO_HISTORY) == [2] * 3 + [0] * 3
    assert round_robin_groups(groups[:1], nothing_unfinished(3), 7, NO_HISTORY) == [
        1
    ]  # one that goes on elsewhere


# Recipes take the dispatch of the version that their paper cites.


def test_verl_hands_out_whole_groups_in_0_4_and_single_responses_since():
    for name in ("verl_colocated", "one_step_off"):
        for version in ("0.4", 0.4):
            assert make_system(name, {"version": version}).dispatch.name == "even_split"
        assert make_system(name, {}).dispatch.name == "least_requests"
    assert (
        make_system("verl_colocated", {"version": "0.4", "dispatch": "round_robin"}).dispatch.name
        == "round_robin"
    )
    with pytest.raises(InputError, match=r"system verl_colocated: version is '0.9'"):
        make_system("verl_colocated", {"version": 0.9})


@pytest.mark.parametrize(
    "name", ["verl_2x", "rlhfuse", "verl_draft_model", "verl_ngram", "specactor", "tlt"]
)
def test_what_a_paper_built_on_or_compared_with_verl_0_4_has_its_dispatch(name):
    assert make_system(name, {}).dispatch.name == "even_split"


@given(
    st.sampled_from(sorted(DISPATCHES)), st.integers(0, 50), st.integers(1, 9), st.integers(0, 100)
)
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
    dispatcher.submit(
        [sample(0, response_tokens=20), sample(1, response_tokens=3), sample(2, response_tokens=20)]
    )
    env.run(until=5.0)  # worker 0 holds two, worker 1 none any more
    ends = env.run(gather(env, dispatcher.submit([sample(3), sample(4)])))
    assert [end.segments[0].worker for end in ends] == [1, 1]


def test_round_robin_counts_over_all_that_was_submitted():
    env = simpy.Environment()
    dispatcher = dispatcher_of(env, workers(env, 3), "round_robin")
    events = [
        *dispatcher.submit([sample(0), sample(1)]),
        *dispatcher.submit([sample(2), sample(3)]),
    ]
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

    policy_version, groups = 0, None

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
    assert stopped == rollout(0, {0: 3}, done=False)._replace(
        sample=stopped.sample, first_token_s=1.0
    )


# Moves, withdrawals, losses.


def dispatch(**parameters):
    return Dispatch("a test", least_requests, **parameters)


def test_what_was_withdrawn_does_not_move():
    env = simpy.Environment()
    dispatcher = Dispatcher(env, workers(env), dispatch(), recorder())
    [end] = dispatcher.submit([sample(0, response_tokens=50)])
    env.run(until=2.5)
    dispatcher.withdraw([sample(0, response_tokens=50)])
    dispatcher.move(sample(0, response_tokens=50), 1)
    assert (env.run(end).done, env.now) == (False, 3.0)


def test_a_sample_that_ends_at_the_instant_it_is_withdrawn_is_done():
    env = simpy.Environment()
    dispatcher = Dispatcher(env, workers(env), dispatch(), recorder())
    pair = [sample(0, response_tokens=5), sample(1, response_tokens=5)]
    first, _ = dispatcher.submit(pair)
    taken = []
    first.callbacks.append(lambda _: taken.append(dispatcher.withdraw(pair[1:])))
    env.run()
    assert [rollout.done for rollout in taken[0].value] == [True]


def test_a_sample_that_waits_goes_where_it_is_moved_when_that_worker_has_room():
    env = simpy.Environment()
    dispatcher = Dispatcher(env, workers(env), dispatch(per_worker=1), recorder())
    batch = [
        sample(0, response_tokens=9),
        sample(1, response_tokens=20),
        sample(2, response_tokens=5),
    ]
    ends = dispatcher.submit(batch)
    dispatcher.move(batch[2], 1)
    rollouts = env.run(gather(env, ends))
    assert [(rollout.segments[0].worker, rollout.finished_s) for rollout in rollouts] == [
        (0, 9),
        (1, 20),
        (1, 25),
    ]


def test_only_who_lost_its_worker_waits_for_it():
    env = simpy.Environment()
    fleet = workers(env)
    dispatcher = Dispatcher(env, fleet, dispatch(on_loss="wait"), recorder())
    ends = dispatcher.submit([sample(0, response_tokens=10), sample(1, response_tokens=20)])
    env.run(until=2.5)
    dispatcher.retire(0)  # the first goes on at the other worker
    assert [s.worker for s in env.run(ends[0]).segments] == [0, 1]
    dispatcher.retire(1, lost=True)
    fleet[1].fail()
    env.run(until=50.5)
    dispatcher.activate(0)
    env.run(until=100.5)
    assert [rollout.tokens for rollout in dispatcher.waiting()] == [
        12
    ]  # it ended with the pass that ran
    dispatcher.activate(1, lost=True)
    fleet[1].restore()
    assert env.run(ends[1]).segments[-1].worker == 1


def test_a_worker_that_was_retired_and_lost_takes_samples_again_once_neither_lasts():
    env = simpy.Environment()
    dispatcher = Dispatcher(env, workers(env), dispatch(), recorder())
    dispatcher.retire(0)
    dispatcher.retire(0, lost=True)
    dispatcher.activate(0)
    assert (dispatcher.active, dispatcher.lost) == ([1], [0])
    dispatcher.activate(0, lost=True)
    assert (dispatcher.active, dispatcher.lost) == ([0, 1], [])


def test_what_was_withdrawn_while_it_waited_for_its_worker_is_not_started_when_the_worker_is_back():
    env = simpy.Environment()
    [worker] = workers(env, 1)
    dispatcher = Dispatcher(env, [worker], dispatch(on_loss="wait"), recorder())
    dispatcher.submit([sample(0, response_tokens=10)])
    env.run(until=2.5)
    dispatcher.retire(0, lost=True)
    worker.fail()
    env.run(until=5.5)
    dispatcher.withdraw([sample(0, response_tokens=10)])
    worker.restore()
    dispatcher.activate(0, lost=True)
    env.run(until=50.0)
    assert dispatcher.held() == [[]]


def test_who_needs_new_weights_waits_for_room_where_they_are():
    env = simpy.Environment()
    fleet = workers(env)
    dispatcher = Dispatcher(env, fleet, dispatch(per_worker=1), recorder())
    fleet[1].load_weights(1)
    env.run(until=10.5)
    dispatcher.submit([sample(0, response_tokens=5)], to=[1])
    [end] = dispatcher.submit([sample(1, response_tokens=5)], min_version=1)
    assert env.run(end).segments[0].worker == 1
    assert env.now == 10.5 + 5 + 5


def test_a_pooled_cache_is_fetched_unless_its_worker_was_lost_or_the_weights_are_others():
    env, at = simpy.Environment(), {}
    fleet = [Watched(worker, at, 10) for worker in workers(env)]
    dispatcher = Dispatcher(env, fleet, dispatch(chunk_tokens=4, kv_pool=True), recorder())
    env.run(gather(env, dispatcher.submit([sample(0, response_tokens=10)])))
    assert fleet[0].cached == [False, True, True]
    [end] = dispatcher.submit([sample(1, response_tokens=10)])
    env.run(until=env.now + 1.5)
    dispatcher.retire(0, lost=True)
    fleet[0].fail()
    env.run(end)
    assert fleet[1].cached[:2] == [False, True]
    [end] = dispatcher.submit([sample(2, response_tokens=6)])
    env.run(until=env.now + 3.5)
    dispatcher.retire(1)
    env.run(until=env.now + 1.0)
    env.run(fleet[1].load_weights(1))
    dispatcher.activate(1)
    assert [s.policy_version for s in env.run(end).segments] == [0, 1]
    assert fleet[1].cached[-2:] == [False, False]


def test_a_sample_is_not_submitted_twice_at_once():
    env = simpy.Environment()
    dispatcher = Dispatcher(env, workers(env), dispatch(), recorder())
    dispatcher.submit([sample(0)])
    with pytest.raises(ValueError, match="sample 0 is submitted although it has not come back"):
        dispatcher.submit([sample(0)])


# What holds whatever is asked of it.


class Watched:
    """A worker, and what the dispatcher has it do: nobody is at two workers, no worker has more than it may."""

    def __init__(self, worker, at, most):
        self.worker, self.at, self.most = worker, at, most
        self.lost = False
        self.cached = []

    def __getattr__(self, name):
        return getattr(self.worker, name)

    def submit(self, sample, partial=None, max_tokens=None, cached=False):
        assert not self.lost
        assert sample.uid not in self.at
        assert partial is None or not partial.done
        self.at[sample.uid] = self
        assert sum(worker is self for worker in self.at.values()) <= self.most
        self.cached.append(cached)
        stay = self.worker.submit(sample, partial, max_tokens, cached)
        stay.callbacks.append(lambda _: self.at.pop(sample.uid))
        return stay


RULES = st.builds(
    Dispatch,
    st.just("a test"),
    st.sampled_from([rule.place for rule in DISPATCHES.values()]),
    st.sampled_from([rule.queue for rule in DISPATCHES.values()]),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([None, 3, 8]),
    st.booleans(),
    st.sampled_from(["elsewhere", "wait"]),
)
TIGHT = Limits(max_num_seqs=2, max_num_batched_tokens=16, block_size=4, kv_blocks=30)


@examples(300)
@given(st.data(), RULES, st.integers(1, 3), st.sampled_from([ROOMY, TIGHT]))
def test_every_sample_comes_back_once_with_all_its_tokens_whatever_happens_to_it_on_the_way(
    data, rule, count, limits
):
    """I12: a submission comes back once."""
    env, at = simpy.Environment(), {}
    record = recorder(*(f"rollout-{i:03d}" for i in range(count)))
    fleet = [
        Watched(a_worker(env, i, limits, 2.0, record), at, rule.per_worker or 10**9)
        for i in range(count)
    ]
    dispatcher = Dispatcher(env, fleet, rule, record)
    out, back, length = {}, {}, {}  # who was submitted and has not come back; who has; the lengths

    def submit(samples, **more):
        for one, end in zip(samples, dispatcher.submit(samples, **more), strict=True):
            assert one.uid not in out
            out[one.uid] = one
            end.callbacks.append(came_back)

    def came_back(end):
        uid = end.value.sample.uid
        del out[uid]
        assert end.value.done == (end.value.tokens == length[uid])
        back[uid] = end.value

    def new(n):
        made = []
        for _ in range(n):
            uid = len(length)
            length[uid] = data.draw(st.integers(1, 20))
            one = sample(uid, response_tokens=length[uid])
            made.append(one._replace(prompt_id=data.draw(st.integers(0, 3)), epoch=uid // 7))
        return made

    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(
            st.sampled_from(
                [
                    "submit",
                    "to",
                    "cut",
                    "again",
                    "withdraw",
                    "move",
                    "retire",
                    "lose",
                    "activate",
                    "load",
                ]
            )
        )
        worker = data.draw(st.integers(0, count - 1))
        some = (
            [one for one in out.values() if data.draw(st.booleans())]
            if what in ("withdraw", "move")
            else []
        )
        if what == "submit":
            submit(
                new(data.draw(st.integers(1, 6))),
                min_version=data.draw(st.sampled_from([0, 0, 1, 2])),
            )
        elif what == "to":
            submit(new(2), to=[worker, worker])
        elif what == "cut":
            submit(new(2), max_tokens=data.draw(st.integers(1, 10)))
        elif what == "again":
            unfinished = [rollout for rollout in back.values() if not rollout.done]
            for rollout in unfinished:
                del back[rollout.sample.uid]
            submit([rollout.sample for rollout in unfinished], partials=unfinished)
        elif what == "withdraw":
            dispatcher.withdraw(some)
        elif what == "move":
            for one in some:
                dispatcher.move(one, data.draw(st.one_of(st.none(), st.integers(0, count - 1))))
        elif what == "retire":
            dispatcher.retire(worker)
        elif what == "lose" and not fleet[worker].lost:
            dispatcher.retire(worker, lost=True)
            fleet[worker].lost = True
            fleet[worker].fail()
        elif what == "activate":
            fleet[worker].lost = False
            fleet[worker].restore()
            dispatcher.activate(worker, lost=True)
            dispatcher.activate(worker)
        elif what == "load":
            on_fire(
                fleet[worker].load_weights(fleet[worker].policy_version + 1),
                lambda _: dispatcher.weights_changed(),
            )
        env.run(until=env.now + data.draw(st.sampled_from([0.25, 1.0, 1.5, 4.0])))
        held = [one.uid for samples in dispatcher.held() for one in samples]
        assert sorted(held) == sorted(at)
        assert sorted(held + [rollout.sample.uid for rollout in dispatcher.waiting()]) == sorted(
            out
        )
    for i, worker in enumerate(fleet):
        worker.lost = False
        worker.restore()
        dispatcher.activate(i, lost=True)
        dispatcher.activate(i)
        worker.load_weights(100)  # what anybody needs
    env.run(until=env.now + 10_000)
    dispatcher.weights_changed()
    env.run(until=env.now + 10_000)
    unfinished = [rollout for rollout in back.values() if not rollout.done]
    submit([rollout.sample for rollout in unfinished], partials=unfinished)
    env.run(until=env.now + 10_000)
    assert not out
    assert not at
    assert {uid: rollout.tokens for uid, rollout in back.items()} == length
    assert all(rollout.done for rollout in back.values())
    assert (
        not len(dispatcher._waiting.queue)
        and not dispatcher._waiting._void
        and not dispatcher.waiting()
    )
    if rule.chunk_tokens is not None:
        stays = [segment.tokens for rollout in back.values() for segment in rollout.segments]
        assert max(stays, default=0) <= rule.chunk_tokens


@pytest.mark.parametrize("uid", [1, EVALUATION], ids=["of training", "of an evaluation"])
def test_a_sample_that_waits_outside_is_not_started_by_a_move(uid):
    env = simpy.Environment()
    workers = [a_worker(env, i) for i in range(2)]
    dispatcher = Dispatcher(
        env, workers, DISPATCHES["least_requests"], recorder(), max_concurrent=1
    )
    dispatcher.submit([sample(0), sample(uid)])
    dispatcher.move(sample(uid), 1)
    assert dispatcher.unfinished.sum() == dispatcher.in_flight == 1
