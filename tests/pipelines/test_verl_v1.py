"""verl V1's replay buffer: simrl's words decide as the small reference does, in random states; its modes, by hand."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    """The group of 10 tokens has equal rewards: it is evicted at 10, and credited with two of 10 tokens, one of them surplus."""
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
