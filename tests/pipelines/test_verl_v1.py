"""verl V1's replay buffer: simrl's words decide as the small reference does, in random states; its modes, by hand."""

from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from simrl.pipelines.buffered import until_next
from simrl.pipelines.streaming import Finished
from simrl.pipelines.verl_v1 import evicted, oldest_stamp_first, refill
from tests.helpers import counted, examples, rows, trace
from tests.references.verl_v1 import SynchronousLooks, asynchronous_look

stamps = st.lists(st.integers(1, 6), max_size=8)


def finished_at(watched):
    return [round(update["finished_s"], 1) for update in rows(watched.result.steps)]


def group(number, stamp, equal):
    return Finished(number, stamp, [SimpleNamespace(reward=r) for r in (1.0, float(equal))])


@examples(1000)
@given(
    step=st.integers(1, 8),
    batch=st.integers(1, 4),
    running=stamps,
    finished=stamps,
    equal=st.sets(st.integers(0, 7)),
    threshold=st.none() | st.integers(1, 4),
    waits=st.booleans(),
    updates=st.integers(1, 4),
)
def test_the_words_of_the_asynchronous_modes_decide_as_the_reference(
    step, batch, running, finished, equal, threshold, waits, updates
):
    step = max([step, *running, *finished])
    reference = asynchronous_look(
        step,
        batch,
        {f"r{i}": stamp for i, stamp in enumerate(running)},
        {str(i): stamp for i, stamp in enumerate(finished)},
        {str(i) for i in equal if i < len(finished)},
        threshold,
        waits,
    )
    stream = SimpleNamespace(
        noted_version=(step - 1) * updates,
        batch=batch,
        running=dict(enumerate(running)),
        buffer=[group(i, stamp, i in equal) for i, stamp in enumerate(finished)],
    )
    longest = None if waits else threshold
    gone = {
        str(one.number)
        for one in stream.buffer
        if evicted(stream, one, updates=updates, longest=longest, filters=True)
    }
    assert gone == reference.evicted
    if not gone:
        taken = oldest_stamp_first(stream, updates=updates, waits_at=threshold if waits else None)
        names = None if taken is None else [str(one.number) for one in taken]
        assert names == reference.batch


@examples(1000)
@given(
    batch=st.integers(1, 4),
    most=st.integers(1, 3),
    looks=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 3)), max_size=9),
)
def test_the_synchronous_mode_credits_as_the_reference(batch, most, looks):
    rule, credit, good = SynchronousLooks(batch, most), 0, 0
    for running, more_good, equal in looks:
        good += more_good
        look = rule.look(["r"] * running, ["g"] * good, {f"e{i}" for i in range(equal)})
        begins, credit = refill(credit, equal, good >= batch, running, most * batch)
        assert begins == look.begins


@pytest.mark.parametrize("waited, left", [(0.0, 0.0), (0.1, 1.9), (2.0, 0.0), (31.0, 1.0)])
def test_the_buffer_is_looked_at_every_two_seconds(waited, left):
    assert until_next(waited, 2.0) == pytest.approx(left)


def test_a_synchronous_step_ends_at_the_look_after_its_last_response():
    """31 tokens, a second each: the look at 32; then ten seconds of a load, and 20 tokens to the look at 62."""
    lengths = [[[(4, 10)], [(4, 31)]], [[(4, 10)], [(4, 20)]]]
    assert finished_at(counted("verl_v1_sync", {}, trace(lengths), 2)) == [32.8, 63.5]


@pytest.mark.parametrize(
    "most, begun, end_s",
    [
        # The other group of 15 leaves room for one at first; the second begins at the look after it, at 16, and is drained.
        (1, [(0, 4), (10, 2), (16, 2)], 28.8),
        (2, [(0, 4), (10, 4)], 22.8),
    ],
)
def test_the_synchronous_mode_replaces_a_group_with_equal_rewards_by_two(most, begun, end_s):
    """The group of 10 tokens has equal rewards: evicted at 10, it is credited with two of 10 tokens, one of them surplus."""
    run = counted(
        "verl_v1_sync",
        {"filter_groups": True, "max_inflight_batches": most},
        trace(
            [[[(4, 10)] * 2, [(4, 15)] * 2], [[(4, 10)] * 2, [(4, 10)] * 2]],
            [[[1, 1], [0, 1]], [[0, 1], [0, 1]]],
        ),
        1,
    )
    assert [(round(s.time_s), len(s.samples)) for s in run.submissions] == begun
    assert finished_at(run) == [end_s]


THREE_STEPS = [[[(4, 10)], [(4, 31)]], [[(4, 10)], [(4, 20)]], [[(4, 10)], [(4, 25)]]]


def parts(watched, uid):
    """The version and the tokens of each part of a response."""
    segments = rows(watched.result.segments)
    return [(s["policy_version"], s["tokens"]) for s in segments if s["uid"] == uid]


def test_a_colocated_trainer_takes_the_gpus_when_a_batch_is_ready_and_the_rest_goes_on_later():
    """Two batches begin at 0. At 10 a group of each is ready: the others come back a pass later with 11 tokens, a load of ten
    seconds follows the update, and the response of 31 tokens goes on twice."""
    run = counted("verl_v1_colocate_async", {}, trace(THREE_STEPS), 3)
    assert finished_at(run) == [11.8, 33.5, 55.3]
    assert parts(run, 1) == [(0, 11), (1, 11), (2, 9)]
    begun = [(round(s.time_s), s.version) for s in run.submissions if len(s.samples) == 1]
    assert [time_s for time_s, _ in begun] == sorted(time_s for time_s, _ in begun)
    assert {version for _, version in begun} == {0, 1, 2}


def test_a_colocated_trainer_lets_a_response_go_on_at_its_own_worker():
    lengths = [[[(4, 40 + 7 * (step + i)), (4, 90 - 9 * i)] for i in range(4)] for step in range(3)]
    run = counted("verl_v1_colocate_async", {}, trace(lengths), 6, workers=3)
    at = {}
    for segment in rows(run.result.segments):
        at.setdefault(segment["uid"], []).append(segment["worker"])
    assert max(len(workers) for workers in at.values()) > 1
    assert all(len(set(workers)) == 1 for workers in at.values())


def test_on_gpus_of_its_own_a_mini_batch_trains_when_ready_and_weights_follow_the_last_one():
    """Two mini-batches of a group each are ready at 10; then weights are loaded for ten seconds, and what ran prefills again. A
    group of the first step ends at 30, behind its prefill."""
    run = counted("verl_v1_separate_async", {"sync_step": 2}, trace(THREE_STEPS), 4)
    assert finished_at(run) == [10, 10, 31, 33]
    assert parts(run, 3) == [(0, 11), (2, 9)]
    versions = [update["policy_version"] for update in rows(run.result.steps)]
    assert versions == [0, 1, 2, 3]
