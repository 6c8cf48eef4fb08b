"""Rounds: when a system that stops, cuts or filters rollouts is the plain synchronous one, and when it is not."""

import pytest
from hypothesis import given, strategies as st

from simrl.pipelines.rounds import times
from tests.helpers import examples, rows, trace, trained
from tests.pipelines.test_pipelines import EQUAL, by_name, length, run, timed, workers

# Each with its rule made idle.
IDLE = [
    ("partial_rollout", {"budget_tokens": 60}),
    ("april", {"over_sampling": 1.0}),
    ("rollpacker", {"eta_prompts": 1.0, "eta_responses": 1.0}),
    ("sortedrl", {"batches": 1}),
    ("sortedrl", {"batches": 1, "unit": "group", "unfinished": "restart"}),
    ("dapo", {"over_sampling": 1.0, "minibatches": 1}),
]
three_groups = st.lists(
    st.lists(st.tuples(length, length), min_size=2, max_size=3), min_size=3, max_size=3
)


@pytest.mark.parametrize("system", IDLE, ids=by_name)
@examples(15)
@given(st.lists(three_groups, min_size=1, max_size=3).map(trace), workers)
def test_a_system_whose_rule_has_nothing_to_do_is_verl_colocated(system, trace, workers):
    """Budgets that no response reaches, no over-sampling, one batch at a time, rewards that all differ: the same, to the token,
    whatever the lengths are (steps of equally many groups)."""
    name, parameters = system
    system = name, {"dispatch": "least_requests", **parameters}  # DAPO's own is verl 0.4's
    expected, found = (
        run(("verl_colocated", {}), trace, workers).result,
        run(system, trace, workers).result,
    )
    assert found.segments.equals(expected.segments)
    assert found.samples.equals(expected.samples)
    assert found.spans.equals(expected.spans)
    assert found.steps.equals(expected.steps)


def times_of(result):
    return [pytest.approx(u["finished_s"], abs=1e-6) for u in rows(result.steps)]


@pytest.mark.parametrize(
    "system",
    [
        ("partial_rollout", {"budget_tokens": 30}),
        ("april", {"over_sampling": 1.0}),
        ("rollpacker", {}),
        ("sortedrl", {"batches": 1}),
        ("dapo", {"over_sampling": 1.0, "minibatches": 1}),
    ],
    ids=by_name,
)
def test_with_equal_lengths_steps_take_what_they_take_on_verl_colocated(system):
    """RollPacker's surplus too finishes with the rest, and costs nothing while it fits into the passes."""
    name, parameters = system
    assert times_of(timed(name, 4, EQUAL, **parameters)) == times_of(
        timed("verl_colocated", 4, EQUAL)
    )


def test_april_with_equal_lengths_rolls_out_every_other_step_alone():
    """All four groups of the first rollout are complete at once: the second update needs none, so it saves load and rollout."""
    plain, over = timed("verl_colocated", 4, EQUAL), timed("april", 4, EQUAL, over_sampling=2.0)
    saved_s = 30
    at = [u["finished_s"] for u in rows(plain.steps)]
    assert times_of(over) == [at[0], at[1] - saved_s, at[2] - saved_s, at[3] - 2 * saved_s]
    assert [len(uids) for uids in trained(over)] == [4] * 4


def test_so_many_times_a_number_is_rounded_up_but_not_because_of_floats():
    assert [times(1.1, 10), times(1.25, 8), times(1.25, 9), times(1.0, 7)] == [11, 10, 12, 7]
