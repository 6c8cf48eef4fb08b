"""Partial rollout (Kimi k1.5): what is cut at the budget, what goes on when, and under which weights."""

import pytest
from hypothesis import given, strategies as st

from simrl.trace.workload import Workload
from tests.helpers import examples, rows, trace, trained, versions, with_status
from tests.pipelines.test_pipelines import run, timed, traces, workers

# Two groups of one response a step; uids 0 to 3, then the trace begins anew with 4.
LONG_AND_SHORT = trace([[[(4, 5)], [(4, 25)]], [[(4, 5)], [(4, 5)]]])


def test_a_response_longer_than_the_budget_goes_on_in_the_next_updates_where_it_was():
    result = timed("partial_rollout", 3, LONG_AND_SHORT, reward_s=0.0, budget_tokens=10)
    assert trained(result) == [[0], [2, 3], [1, 4]]
    assert versions(result)[1] == [(0, 10), (1, 10), (2, 5)]
    assert versions(result)[5] == [(2, 10)]  # as long; cut too
    assert with_status(result, "in_flight") == [5]
    # It is at the worker in every rollout from its first pass on; each is over after ten.
    second = [s for s in rows(result.segments) if s["uid"] == 1]
    loads = [s["ended_s"] for s in rows(result.spans) if s["kind"] == "load_weights"]
    assert [(s["started_s"], s["ended_s"]) for s in second] == [
        (0.0, 10.0),
        (loads[0], pytest.approx(loads[0] + 10)),
        (loads[1], pytest.approx(loads[1] + 5)),
    ]
    assert [u["off_policyness_max"] for u in rows(result.steps)] == [0, 0, 2]
    assert rows(result.steps)[2]["off_policyness_mean"] == pytest.approx((10 * 2 + 10 * 1) / 30)


def test_a_group_is_trained_when_its_last_response_is_done():
    result = timed(
        "partial_rollout", 2, trace([[[(4, 5), (4, 15)]], [[(4, 2), (4, 3)]]]), budget_tokens=10
    )
    # With nothing complete at 10, the budget is given once more, under the same weights; then both responses train together.
    assert trained(result) == [[0, 1], [2, 3]]
    assert versions(result)[1] == [(0, 10), (0, 5)]
    assert [u["off_policyness_max"] for u in rows(result.steps)] == [0, 0]


def test_a_response_of_exactly_the_budget_is_done():
    result = timed("partial_rollout", 1, trace([[[(4, 10)], [(4, 11)]]]), budget_tokens=10)
    assert trained(result) == [[0]]


def test_what_is_trained_is_a_batch_an_update_in_the_long_run():
    steps = trace([[[(4, 3)], [(4, 12)], [(4, 38)], [(4, 7)]]])
    result = timed("partial_rollout", 24, steps, budget_tokens=10)
    sizes = [u["samples"] for u in rows(result.steps)]
    assert sizes[0] == 2
    assert sizes[4:] == [4] * 20  # 38 tokens are in their fourth rollout done


@examples(40)
@given(traces, workers, st.integers(1, 70))
def test_no_response_gets_more_than_its_budget_in_a_rollout_and_what_goes_on_goes_first(
    trace, workers, budget
):
    watched = run(("partial_rollout", {"budget_tokens": budget}), trace, workers, steps=5)
    batch = Workload(trace).batch_groups
    for row in rows(watched.result.samples):
        parts = versions(watched.result).get(row["uid"], [])
        assert all(tokens <= budget for _, tokens in parts)
        # Every stay but the last, and but the one in which the run ended, used all of it.
        assert all(tokens == budget for _, tokens in parts[:-1])
    drawn = [{s.uid for s in submission.samples} for submission in watched.submissions]
    new = [uids - set().union(*drawn[:i]) for i, uids in enumerate(drawn)]
    for version in range(5):
        groups = {
            (s.epoch, s.step, s.prompt_id)
            for submission, uids in zip(watched.submissions, new, strict=True)
            if submission.version == version
            for s in submission.samples
            if s.uid in uids
        }
        assert len(groups) == batch
