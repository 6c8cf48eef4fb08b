"""APRIL: when a rollout stops, what goes on where it was, and what is complete too early to be lost."""

import math

import pytest
from hypothesis import given, strategies as st

from simrl.trace.workload import Workload
from tests.helpers import examples, rows, trace, trained, versions, with_status
from tests.pipelines.test_pipelines import run, timed, traces, workers

# Two groups of one response a step, four at work.
UNEVEN = trace([[[(4, 10)], [(4, 30)]], [[(4, 12)], [(4, 40)]]])


def test_a_rollout_stops_with_its_batch_and_the_others_go_on_in_the_next():
    result = timed("april", 3, UNEVEN, over_sampling=2.0, reward_s=0.0)
    # The first and the third are done at 12; the others hear of it at the next boundary, and have 13 tokens then.
    first = [
        (s["uid"], s["tokens"], s["ended_s"])
        for s in rows(result.segments)
        if s["policy_version"] == 0
    ]
    assert first == [(0, 10, 10.0), (1, 13, 13.0), (2, 12, 12.0), (3, 13, 13.0)]
    # They are at work again with two new ones, of 10 and 30 tokens; the new short one and the old 30 (17 to go) come first.
    assert trained(result)[:2] == [[0, 2], [1, 4]]
    assert versions(result)[1] == [(0, 13), (1, 17)]
    assert versions(result)[3][:2] == [(0, 13), (1, 18)]
    assert versions(result)[5][:1] == [(1, 18)]
    # Third: 9 to go of the old 40, 12 of the old 30, and new ones of 12 and 40: two come at the same instant, after the first.
    assert trained(result)[2] == [3, 5]
    assert versions(result)[3] == [(0, 13), (1, 18), (2, 9)]
    assert [u["off_policyness_max"] for u in rows(result.steps)] == [0, 1, 2]


def test_what_is_complete_beyond_the_batch_waits_and_trains_without_a_rollout():
    equal = trace([[[(4, 10)], [(4, 10)]]])
    result = timed("april", 3, equal, over_sampling=2.0, reward_s=0.0)
    assert trained(result) == [[0, 1], [2, 3], [4, 5]]
    assert [u["off_policyness_max"] for u in rows(result.steps)] == [0, 1, 0]
    assert with_status(result, "buffered") == [6, 7]
    rollouts = [
        (s["started_s"], s["ended_s"]) for s in rows(result.spans) if s["kind"] == "rollout"
    ]
    assert [end - start for start, end in rollouts] == [pytest.approx(10)] * 2


def test_a_response_done_before_its_worker_hears_of_the_end_is_kept():
    result = timed("april", 2, trace([[[(4, 10)], [(4, 11)]]]), over_sampling=2.0, reward_s=0.0)
    # Four are at work: 10, 11, 10, 11. Two are done at 10, and the other two at 11, when the worker would stop them.
    assert trained(result) == [[0, 2], [1, 3]]
    assert versions(result)[1] == [(0, 11)]


@examples(40)
@given(traces, workers, st.floats(1, 3))
def test_every_update_trains_a_batch_and_nothing_is_ever_dropped(trace, workers, over_sampling):
    watched = run(("april", {"over_sampling": over_sampling}), trace, workers, steps=6)
    result, batch = watched.result, Workload(trace).batch_groups
    samples = {row["uid"]: row for row in rows(result.samples)}
    assert with_status(result, "dropped") == []
    for uids in trained(result):
        groups = {
            (samples[u]["epoch"], samples[u]["trace_step"], samples[u]["prompt_id"]) for u in uids
        }
        assert len(groups) == batch
    # A rollout has at most so many groups at work, and those of the rollout before first.
    seen = set()
    for submission in watched.submissions:
        groups = {(s.epoch, s.step, s.prompt_id) for s in submission.samples}
        assert 1 <= len(groups) <= math.ceil(over_sampling * batch)
        again = [s.uid in seen for s in submission.samples]
        assert again == sorted(again, reverse=True)
        seen.update(s.uid for s in submission.samples)
